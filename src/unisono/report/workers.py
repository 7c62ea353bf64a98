"""What does each worker of a run do, and which of them is slow?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unisono.report.phases import Spent
from unisono.report.process_status import UNKNOWN, Process, ProcessState
from unisono.report.status import RunStatus

SLOW = 1.2  # times what is usual: from here on a worker is called slow
USUAL = ("running", "ended", "unknown")  # what is nothing to tell of a worker
_BUSY = 0.05  # cores; who waits uses none, and who computes may have to share one with many
_DOINGS = ("gone", "stopped", "at a disk", "computing", "waiting")  # who is to blame comes first
_MAX_NAMED = 8


@dataclass(frozen=True)
class WorkerLine:
    """One worker."""

    rank: int
    pid: int | None  # None where it is not known
    process: Process
    is_lost: bool = False  # and no other has come in its place
    has_ended: bool = False  # whether the run has, so that its process may
    num_done: int | None = None  # steps that the run had done with the last one of this worker
    shares: Mapping[str, float] | None = None  # the part of its time that each phase took
    work_s: float | None = None  # its time a step, without waiting
    times_slow: float | None = None  # of the slowest: how many times what is usual it computes

    @property
    def state(self) -> str:
        """One word."""
        if self.is_lost:
            return "lost"
        if self.has_ended and self.process.state is ProcessState.GONE:
            return "ended"
        return self.process.state.value


def worker_lines(status: RunStatus, processes: Mapping[int, Process]) -> Iterator[WorkerLine]:
    """Give a line for each who computes, and for each who was lost and not replaced, by rank."""
    spent = status.by_rank
    slow = status.slow()
    for rank in sorted({*status.progress.ranks, *status.progress.lost}):
        named = status.progress.named.get(rank)
        last_step = status.progress.last_step_by_rank.get(rank)
        yield WorkerLine(
            rank,
            None if named is None else named.pid,
            processes.get(rank, UNKNOWN),
            is_lost=rank in status.progress.lost,
            has_ended=status.progress.ended is not None,
            num_done=None if last_step is None else last_step + 1,
            shares=spent[rank].shares if rank in spent else None,
            work_s=_work_s(spent[rank]) if rank in spent else None,
            times_slow=slow[1] if slow and slow[0] == rank and slow[1] > SLOW else None,
        )


def _work_s(spent: Spent) -> float | None:
    share = spent.waiting_share
    if share is None or not spent.num_steps:
        return None
    return spent.total_s * (1 - share) / spent.num_steps


def where(workers: tuple[WorkerLine, ...]) -> str:
    """Say what each worker does, whoever keeps the others waiting first."""
    found: dict[str, list[int]] = {words: [] for words in _DOINGS}
    for worker in workers:
        if words := _doing(worker):
            found[words].append(worker.rank)
    said = [f"{_named(ranks)} {words}" for words, ranks in found.items() if ranks]
    return ": " + "; ".join(said) if said else ""


def _doing(worker: WorkerLine) -> str:
    process = worker.process
    if worker.is_lost or process.state is ProcessState.UNKNOWN:
        return ""
    if process.state is ProcessState.GONE:
        return "gone"
    if process.state is ProcessState.STOPPED:
        return "stopped"
    if process.waits_for_disk:
        return "at a disk"
    if process.cpu is None:
        return ""
    return "computing" if process.cpu >= _BUSY else "waiting"


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"workers {', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"

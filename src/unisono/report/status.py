"""How does a run stand now: what has it come to, and how fast are its newest steps?

Speeds and times are those of the last ten seconds, or of ten steps that took longer. Some between
them may not have been read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unisono.report.events import Event, Start, StepDone, Workers
from unisono.report.phases import Spent, spent_by_rank
from unisono.report.process_status import UNKNOWN, Process, ProcessState
from unisono.report.run_progress import MAX_WORKERS, RunProgress
from unisono.report.slowdown import Slowdown, SlowdownCause

RECENT_S, RECENT_STEPS = 10.0, 10
_MAX_RECENT = 500
USUAL = ("running", "ended", "unknown")  # what is nothing to tell of a worker


class RunStatus:
    """How a run stands, as far as its events have been added. Final.

    Attributes:
        progress: what it has come to.
        recent: the newest steps with the workers that there are now.
        memory: the bytes that tensors of each took last of its device; empty on CPUs.
        findings: what slows the newest steps, the costliest first.
    """

    def __init__(self) -> None:
        self.progress = RunProgress()
        self.recent: deque[StepDone] = deque(maxlen=_MAX_RECENT)
        self.memory: dict[int, int | None] = {}
        self.findings: tuple[Slowdown, ...] = ()

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.progress.add(event)
        if isinstance(event, StepDone):
            self._add_step(event)
        elif isinstance(event, Start | Workers):
            self.recent.clear()  # others compute now
            self.memory.clear()

    def _add_step(self, step: StepDone) -> None:
        recent = self.recent
        if recent and step.step <= recent[-1].step:
            recent.clear()  # with a step that comes again, what was before is old
        recent.append(step)
        # Written so that a time that is not a number, or goes back, makes what was before old.
        while len(recent) > RECENT_STEPS and not (
            0 <= step.time_unix_s - recent[0].time_unix_s < RECENT_S
        ):
            recent.popleft()
        sizes = zip(step.ranks, step.allocated_bytes, strict=False)
        self.memory |= dict(list(sizes)[:MAX_WORKERS])

    @property
    def steps_per_s(self) -> float | None:
        """How many steps are done in a second, evaluations between them included."""
        if not self.recent:
            return None
        first, last = self.recent[0], self.recent[-1]
        seconds = last.time_unix_s - first.time_unix_s
        if last.step > first.step and seconds > 0:
            return (last.step - first.step) / seconds
        return 1 / last.seconds if last.seconds else None

    @property
    def samples_per_s(self) -> float | None:
        """How many samples all workers compute in a second."""
        num_samples = sum(step.num_samples or 0 for step in self.recent)
        if not num_samples or (rate := self.steps_per_s) is None:
            return None
        return rate * num_samples / len(self.recent)

    @property
    def by_rank(self) -> dict[int, Spent]:
        """What each worker spent in the newest steps."""
        found: dict[int, Spent] = {}
        for step in self.recent:
            for rank, spent in spent_by_rank(step):
                found.setdefault(rank, Spent([0.0] * len(spent.phases_s), 0)).add(spent)
        return found

    @property
    def slow_rank(self) -> int | None:
        """Which worker is slow; None: none."""
        slow = (one.rank for one in self.findings if one.cause is SlowdownCause.WORKER)
        return next((rank for rank in slow if rank in self.progress.ranks), None)


@dataclass(frozen=True)
class WorkerLine:
    """One worker."""

    rank: int
    pid: int | None  # None where it is not known
    process: Process
    is_lost: bool = False  # and no other has come in its place
    has_ended: bool = False  # whether the run has, so that its process may
    shares: Mapping[str, float] | None = None  # the part of its time that each phase took
    work_s: float | None = None  # its time a step, without waiting
    is_slow: bool = False  # whether it is slow
    device_bytes: int | None = None  # what its tensors take of its device; None on CPUs

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
    for rank in sorted({*status.progress.ranks, *status.progress.lost}):
        named = status.progress.named.get(rank)
        yield WorkerLine(
            rank,
            None if named is None else named.pid,
            processes.get(rank, UNKNOWN),
            is_lost=rank in status.progress.lost,
            has_ended=status.progress.ended is not None,
            shares=spent[rank].shares if rank in spent else None,
            work_s=spent[rank].working_s if rank in spent else None,
            is_slow=rank == status.slow_rank,
            device_bytes=status.memory.get(rank),
        )

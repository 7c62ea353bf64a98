"""`unisono where`: find the ranks of a job from one of its processes, and describe where each is.

    a process ──► its control block, or that of an ancestor or descendant ──► ranks and processes
            └──► none: RANK in the environment of its descendants (torchrun, srun)
                     └──► not set either: only that process

It does not need the launcher, which may be stopped, or be another launcher than ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from unisono.runtime import procfs
from unisono.runtime.hangs.explanation import Hang, describe, explain
from unisono.runtime.hangs.whereabouts import RankNotes, inspect_ranks, notes_of
from unisono.runtime.workers.control_block import MEMORY_NAME, ControlBlock, control_block_bytes

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True, slots=True)
class FoundJob:
    """The processes of a job."""

    pids: dict[int, int]  # by rank
    # what ranks have written to their control block, if there is one
    notes: dict[int, RankNotes] = field(default_factory=dict)
    ended: tuple[int, ...] = ()  # ranks that no longer have a process


def where(pid: int, folder: str = "") -> str:
    """Describe where each rank of a job is, and who waits for whom; paths are from `folder`."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except OSError as error:
        raise ValueError(
            f"PID must be a process that runs and that you may look into, but {pid} is not "
            f"({error.strerror}): name the launcher (`unisono run`), one of its workers, or a "
            f"run's folder, as the user who started it, or as root."
        ) from None
    job = find_job(pid)
    looks = inspect_ranks(job.pids, job.notes)
    hang = Hang(folder=folder, missing=job.ended)
    summary = explain(looks, hang).partition("\n")[0]
    return "\n".join(part for part in (summary, describe(looks, hang)) if part)


def find_job(pid: int) -> FoundJob:
    """Return the ranks of the job that a process belongs to."""
    below = [pid, *procfs.children(pid, recursive=True)]
    for control in _controls([pid, *procfs.ancestors(pid), *below]):
        with_pids = _of_control(control)
        control.close()
        if not set(below).isdisjoint(with_pids.pids.values()):
            return with_pids
    ranks = _ranks_by_environment(below)
    others = {}
    if pid in ranks.values() and (parents := procfs.ancestors(pid)):
        others = _ranks_by_environment(procfs.children(parents[0], recursive=True))
    if not ranks and any(procfs.memories_of(pid, MEMORY_NAME)):  # a launcher's
        raise ValueError(
            f"PID must be of a job whose workers run, but those of {pid} are starting, or have "
            f"ended: try again in a moment."
        )
    return FoundJob({**others, **ranks} or {0: pid})


def _controls(pids: Iterable[int]) -> Iterator[ControlBlock]:
    seen = set()
    for pid in pids:
        for number, _, found in procfs.memories_of(pid, MEMORY_NAME):
            world_size = _world_size(found.st_size)
            if found.st_ino in seen or not world_size:
                continue
            seen.add(found.st_ino)
            try:
                fd = procfs.open_memory(pid, number, MEMORY_NAME, found.st_size)
            except procfs.NotThereError:
                continue
            yield ControlBlock(fd, world_size)


def _world_size(num_bytes: int) -> int:
    """Return the number of ranks for a control block's size; 0 if another version wrote it."""
    one, two = control_block_bytes(1), control_block_bytes(2)
    count, rest = divmod(num_bytes - one, two - one)
    return 0 if rest or count < 0 else count + 1


def _of_control(control: ControlBlock) -> FoundJob:
    processes = {rank: control.lines[rank].process for rank in range(control.world_size)}
    pids = {
        rank: pid for rank, (pid, at) in processes.items() if pid and procfs.started_at(pid) == at
    }
    ended = tuple(rank for rank, one in processes.items() if rank not in pids and any(one))
    return FoundJob(pids, notes_of(control, pids), ended)


def _ranks_by_environment(pids: Sequence[int]) -> dict[int, int]:
    """Return processes by the rank that torchrun and others have set; the first of each rank."""
    ranks = {pid: _rank_of(pid) for pid in pids if procfs.inspect_process(pid).letter}
    return {rank: pid for pid, rank in reversed(ranks.items()) if rank is not None}


def _rank_of(pid: int) -> int | None:
    environ = procfs.environ_of(pid)
    told = (environ.get(name, "") for name in _RANKS)
    return next((int(text) for text in told if text.isdecimal()), None)

"""Do all workers wait for each other? A pure answer from where each waits, and for how long.

A worker that stands still in a process group of torch.distributed may wait for a rank that
computes, so there standing still alone is no fault; everybody's is. Among others, these end::

    worker 0   at the meeting `gradients of step 3`   for worker 1
    worker 1   in all_reduce                          for worker 0

What gloo waits for cannot be seen, but that a program waits for another thread or process can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class IdleWorker(NamedTuple):
    """A worker that may stand still.

    Attributes:
        quiet_s: for how long it has, in seconds.
        place: where it waits for others; empty if nothing tells that it does.
        is_at_meeting: it has come to a meeting of a run to which others have not.
    """

    quiet_s: float
    place: str
    is_at_meeting: bool


def is_deadlock(workers: Mapping[int, IdleWorker], timeout_s: float) -> bool:
    """Tell whether nobody can go on.

    Args:
        workers: all that have not finished.
        timeout_s: how long they may stand still.
    """
    everybody = workers.values()
    if len(everybody) < 2 or any(worker.quiet_s < timeout_s for worker in everybody):
        return False
    # Somebody is awaited for certain, or everybody waits.
    return any(worker.is_at_meeting for worker in everybody) or all(w.place for w in everybody)


def to_end(workers: Mapping[int, IdleWorker]) -> int:
    """Choose the worker that is ended first: one that is not where a run would have it."""
    return min(workers, key=lambda rank: (workers[rank].is_at_meeting, rank))


def deadlock_message(workers: Mapping[int, IdleWorker], pid: int) -> str:
    """Say who waits where.

    Args:
        workers: all that have not finished.
        pid: the process of the one that is ended.
    """
    told = "; ".join(
        f"worker {rank} waits {worker.place or 'for something that cannot be seen'}"
        for rank, worker in sorted(workers.items())
    )
    quiet_s = min(worker.quiet_s for worker in workers.values())
    return (
        f"workers must not wait for each other, but none has moved for {quiet_s:.0f} s: {told}. "
        f"All must call the same collectives in the same order, and none where only some come by. "
        f"Worker {to_end(workers)} (pid {pid}) is ended; `--stall-timeout` or `stall_timeout_s` "
        f"says after how many seconds."
    )

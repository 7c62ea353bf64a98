"""Which worker has stopped moving, and do all of them wait for each other? Pure, look by look.

A worker's heartbeat is the processor time that it has used, together with the meetings it has come
to: both stand still if it is stopped, deadlocked, or waits for something that never comes, and
neither costs it anything. A worker that computes for an hour moves.

In a process group of torch.distributed a worker that stands still may wait for a rank that
computes. There nobody is killed as long as anybody moves, unless a signal has stopped it; but if
nobody moves, and these wait for each other, one is::

    worker 0   at the meeting `gradients of step 3`   for worker 1
    worker 1   in all_reduce                          for worker 0

What gloo waits for cannot be seen, but that a program waits for another thread or process can.

Invariant: time in which the launcher itself stood still (Ctrl-Z, a suspended machine) does not
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

LOOK_EVERY_S = 1.0
_OPTION = "`--stall-timeout` or `stall_timeout_s` says after how many seconds."


@dataclass(frozen=True, slots=True)
class Observation:
    """What one look at a worker has shown."""

    beat: tuple[int, ...]  # what changes as long as it moves
    is_stopped: bool = False  # a signal has stopped it
    is_awaited: bool = False  # other members wait at a meeting to which it has not come
    place: str = ""  # where it waits for others, as far as that can be seen
    is_at_meeting: bool = False  # it waits at a meeting itself
    quiet_s: float = 0.0  # for how long it has held others up without moving, in seconds


Observations = Mapping[int, Observation]


def look(
    before: Observations, seen: Observations, passed_s: float, *, are_grouped: bool = False
) -> dict[int, Observation]:
    """Compare a look at each worker with the one before, and say how long each has been quiet.

    Args:
        before: the last look.
        seen: this one.
        passed_s: the time between them.
        are_grouped: workers may wait for each other in ways that cannot be seen.
    """
    passed_s = min(passed_s, 2 * LOOK_EVERY_S)
    after = {}
    for rank, now in seen.items():
        last = before.get(rank)
        holds_up = now.is_stopped or now.is_awaited or are_grouped
        is_quiet = holds_up and last is not None and last.beat == now.beat
        after[rank] = replace(now, quiet_s=last.quiet_s + passed_s if last and is_quiet else 0.0)
    return after


def stalled(workers: Observations, timeout_s: float, *, are_grouped: bool = False) -> list[int]:
    """List the workers that have not moved for so long, and are to blame for it themselves."""
    return [
        rank
        for rank, worker in workers.items()
        if worker.quiet_s >= timeout_s and (worker.is_stopped or not are_grouped)
    ]


def is_deadlock(workers: Observations, timeout_s: float) -> bool:
    """Tell whether none of these can continue: all that have not finished."""
    everybody = workers.values()
    if len(everybody) < 2 or any(worker.quiet_s < timeout_s for worker in everybody):
        return False
    # Somebody is awaited for certain, or everybody waits.
    return any(worker.is_at_meeting for worker in everybody) or all(w.place for w in everybody)


def worker_to_kill(workers: Observations) -> int:
    """Choose the worker of a deadlock to be killed: one that is not where a run would have it."""
    return min(workers, key=lambda rank: (workers[rank].is_at_meeting, rank))


def stall_message(rank: int, pid: int, step: int, worker: Observation) -> str:
    """Say which worker has stalled, and how."""
    how = (
        "a signal has stopped it (SIGSTOP, or a debugger)"
        if worker.is_stopped
        else "it waits for something that does not come: a lock, a file, a network"
    )
    return (
        f"worker {rank} (pid {pid}) must move while others wait for it, but has not for "
        f"{worker.quiet_s:.0f} s in step {step}: {how}. It is ended; {_OPTION}"
    )


def deadlock_message(workers: Observations, pid: int) -> str:
    """Say who waits where.

    Args:
        workers: all that have not finished.
        pid: the process of the one that is ended.
    """
    places = "; ".join(
        f"worker {rank} waits {worker.place or 'for something that cannot be seen'}"
        for rank, worker in sorted(workers.items())
    )
    quiet_s = min(worker.quiet_s for worker in workers.values())
    return (
        f"workers must not wait for each other, but none has moved for {quiet_s:.0f} s: {places}. "
        f"All must call the same collectives in the same order, and none where only some come by. "
        f"Worker {worker_to_kill(workers)} (pid {pid}) is ended; {_OPTION}"
    )

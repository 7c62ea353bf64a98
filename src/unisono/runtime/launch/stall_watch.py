"""Find workers that have stalled or deadlocked; the launcher checks once a second.

A worker's heartbeat is the processor time that it has used and its number of arrivals. Both stop
changing if the worker is stopped, deadlocked, or waits for something that never comes. A worker
that computes for an hour keeps changing them.

In a process group of torch.distributed a worker that makes no progress may wait for a rank that
computes. There no worker is killed as long as any of them makes progress, unless a signal has
stopped it. If none does and they wait for each other, one is killed::

    worker 0   at the meeting `gradients of step 3`   for worker 1
    worker 1   in all_reduce                          for worker 0

It is not visible what gloo waits for, but only that a program waits for another thread or process.

Invariant: time in which the launcher itself was stopped (Ctrl-Z, suspend) does not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, final

from unisono.runtime.hangs.whereabouts import RankNotes, notes_of
from unisono.runtime.procfs import read_stat, read_text, thread_times
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.membership import Membership

# gloo's thread wakes a hundred times a second even without traffic.
_IDLE_THREADS = ("gloo_tcp_loop",)


class Stalled(NamedTuple):
    """A worker to kill, the message about it, and a description of how it ended."""

    rank: int
    message: str
    how: str


@final
class StallWatch:
    """Watches a job's workers, once a second."""

    def __init__(self, control: ControlBlock, timeout_s: float) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._seen: dict[int, Observation] = {}
        self._looked_at_s = time.monotonic()

    @property
    def due_s(self) -> float:
        """When to call :meth:`poll` next, as a ``time.monotonic`` value."""
        return self._looked_at_s + LOOK_EVERY_S

    def poll(
        self,
        pids: Mapping[int, int],
        membership: Membership | None,
        *,
        are_grouped: bool = False,
        is_everybody: bool = False,
    ) -> list[Stalled]:
        """Check these workers' processes if it is time; return, and forget, the stalled ones.

        `are_grouped`: a process group of several workers has been created. `is_everybody`: no other
        worker, nor the launcher, has anything to do.
        """
        now_s = time.monotonic()
        passed_s = now_s - self._looked_at_s
        if passed_s < LOOK_EVERY_S:
            return []
        notes = notes_of(self._control, () if membership is None else membership.ranks)
        looks = {
            rank: self._observe(rank, pids[rank], notes.get(rank, RankNotes())) for rank in pids
        }
        seen = {rank: look for rank, look in looks.items() if look is not None}
        self._seen = compare(self._seen, seen, passed_s, are_grouped=are_grouped)
        self._looked_at_s = now_s
        late = [rank for rank, one in self._seen.items() if one.quiet_s >= self._timeout_s]
        to_blame = [rank for rank in late if self._seen[rank].is_stopped or not are_grouped]
        if not to_blame and is_everybody and len(late) == len(pids) and is_deadlock(self._seen):
            return [self._deadlocked(pids)]
        return [self._stalled(rank, pids[rank]) for rank in to_blame]

    def _stalled(self, rank: int, pid: int) -> Stalled:
        worker, step = self._seen.pop(rank), self._control.lines[rank].step
        how = (
            "a signal has stopped it (SIGSTOP, or a debugger)"
            if worker.is_stopped
            else "it waits for something that does not come: a lock, a file, a network"
        )
        message = (
            f"worker {rank} (pid {pid}) must move while others wait for it, but has not for "
            f"{worker.quiet_s:.0f} s in step {step}: {how}. It is ended; {_OPTION}"
        )
        return Stalled(rank, message, f"was ended, as it stood still for {worker.quiet_s:.0f} s")

    def _deadlocked(self, pids: Mapping[int, int]) -> Stalled:
        quiet_s = min(worker.quiet_s for worker in self._seen.values())
        places = "; ".join(
            f"worker {rank} waits {worker.place or 'for something that cannot be seen'}"
            for rank, worker in sorted(self._seen.items())
        )
        # Prefer a worker that is not at a barrier of the run.
        rank = min(self._seen, key=lambda rank: (self._seen[rank].is_at_meeting, rank))
        del self._seen[rank]
        message = (
            f"workers must not wait for each other, but none has moved for {quiet_s:.0f} s: "
            f"{places}. All must call the same collectives in the same order, and none where only "
            f"some come by. Worker {rank} (pid {pids[rank]}) is ended; {_OPTION}"
        )
        how = f"was ended, as all workers waited for each other for {quiet_s:.0f} s"
        return Stalled(rank, message, how)

    def _observe(self, rank: int, pid: int, notes: RankNotes) -> Observation | None:
        if (found := processor_time(pid)) is None:
            return None
        ran_ns, is_stopped = found
        arrivals, (count, _) = self._control.lines[rank].arrivals, self._control.wait_of(rank)
        place = f"in {notes.shown_wait}" if notes.shown_wait else ""
        if notes.meeting:
            place = f"at `{notes.meeting}`"
        # A waiting worker wakes up now and then, which is no sign of progress.
        beat = (pid, 0 if place else ran_ns, arrivals, count)
        if not place and arrivals and waits_for_a_thread(pid):
            place = "in a collective of torch.distributed, or for a lock"
        return Observation(beat, is_stopped, notes.is_behind, place, bool(notes.meeting))


def processor_time(pid: int) -> tuple[int, bool] | None:
    """Return a process's total run time and whether it is stopped; None if gone. See proc(5)."""
    stat = read_stat(pid)
    try:
        return None if stat is None else (_ran_ns(pid), stat.is_stopped)
    except (OSError, ValueError):
        return None


def _ran_ns(pid: int) -> int:
    """Return the run time of a process's threads and of its children."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if read_text(thread / "comm").rstrip("\n") not in _IDLE_THREADS:
            if (times := thread_times(thread)) is None:
                raise ProcessLookupError(thread)
            total += times.ran_ns
        # Not every kernel lists children.
        total += sum(_ran_ns(int(child)) for child in read_text(thread / "children").split())
    return total


def waits_for_a_thread(pid: int) -> bool:
    """Return whether a process's first thread waits in a futex, as for locks and gloo. proc(5)."""
    return read_text(Path(f"/proc/{pid}/wchan")).startswith("futex")


LOOK_EVERY_S = 1.0
_OPTION = "`--stall-timeout` or `stall_timeout_s` says after how many seconds."


@dataclass(frozen=True, slots=True)
class Observation:
    """What one check of a worker has shown."""

    beat: tuple[int, ...]  # changes as long as it makes progress
    is_stopped: bool = False  # a signal has stopped it
    is_awaited: bool = False  # other members wait at a barrier that it has not reached
    place: str = ""  # where it waits for others, as far as that is visible
    is_at_meeting: bool = False  # it waits at a barrier itself
    quiet_s: float = 0.0  # how long it has delayed others without progress, in seconds


Observations = Mapping[int, Observation]


def compare(
    before: Observations, seen: Observations, passed_s: float, *, are_grouped: bool = False
) -> dict[int, Observation]:
    """Compare each worker with its last observation, and compute how long it has been quiet.

    `are_grouped`: workers may wait for each other invisibly.
    """
    passed_s = min(passed_s, 2 * LOOK_EVERY_S)
    after = {}
    for rank, now in seen.items():
        last = before.get(rank)
        holds_up = now.is_stopped or now.is_awaited or are_grouped
        is_quiet = holds_up and last is not None and last.beat == now.beat
        after[rank] = replace(now, quiet_s=last.quiet_s + passed_s if last and is_quiet else 0.0)
    return after


def is_deadlock(workers: Observations) -> bool:
    """Return whether workers that are all quiet wait for each other."""
    everybody = workers.values()
    is_awaited = any(worker.is_at_meeting for worker in everybody)  # for certain
    return len(everybody) > 1 and (is_awaited or all(worker.place for worker in everybody))

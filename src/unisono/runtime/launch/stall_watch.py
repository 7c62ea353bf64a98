"""Finds workers that have stalled or deadlocked; the launcher looks once a second.

A worker's heartbeat is the processor time that it has used and the meetings it has come to. Both
stand still if it is stopped, deadlocked, or waits for something that never comes. A worker that
computes for an hour moves.

In a process group of torch.distributed a worker that stands still may wait for a rank that
computes. There no worker is killed as long as any moves, unless a signal has stopped it. If none
moves and they wait for each other, one is killed::

    worker 0   at the meeting `gradients of step 3`   for worker 1
    worker 1   in all_reduce                          for worker 0

What gloo waits for cannot be seen, but that a program waits for another thread or process can.

Invariant: time in which the launcher itself stood still (Ctrl-Z, a suspended machine) does not
count.
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
from unisono.runtime.workers.launcher_messages import Membership

# gloo's wakes a hundred times a second, whether anything comes or not.
_IDLE_THREADS = ("gloo_tcp_loop",)


class Stalled(NamedTuple):
    """A worker that is to be killed, what to say of it now, and how it has then ended, in words."""

    rank: int
    message: str
    how: str


@final
class StallWatch:
    """Looks at a job's workers once a second."""

    def __init__(self, control: ControlBlock, timeout_s: float) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._seen: dict[int, Observation] = {}
        self._looked_at_s = time.monotonic()

    @property
    def due_s(self) -> float:
        """When to :meth:`look` next, in the time of ``time.monotonic``."""
        return self._looked_at_s + LOOK_EVERY_S

    def look(
        self,
        pids: Mapping[int, int],
        membership: Membership | None,
        *,
        are_grouped: bool = False,
        is_everybody: bool = False,
    ) -> list[Stalled]:
        """Look, if it is time, at the workers with these processes; give, and forget, the stalled.

        `are_grouped`: there has been a process group of several workers. `is_everybody`: no other
        worker, nor the launcher, has something to do.
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
        self._seen = look(self._seen, seen, passed_s, are_grouped=are_grouped)
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
        # One that is not where a run would have it.
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
        # A worker that waits wakes up now and then, which is no sign of life.
        beat = (pid, 0 if place else ran_ns, arrivals, count)
        if not place and arrivals and waits_for_a_thread(pid):
            place = "in a collective of torch.distributed, or for a lock"
        return Observation(beat, is_stopped, notes.is_behind, place, bool(notes.meeting))


def processor_time(pid: int) -> tuple[int, bool] | None:
    """Return how long all of a process has run, and whether it is stopped; None: gone. proc(5)."""
    stat = read_stat(pid)
    try:
        return None if stat is None else (_ran_ns(pid), stat.is_stopped)
    except (OSError, ValueError):
        return None


def _ran_ns(pid: int) -> int:
    """Add up the time of a process, and of those it waits for: its threads and its children."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if read_text(thread / "comm").rstrip("\n") not in _IDLE_THREADS:
            if (times := thread_times(thread)) is None:
                raise ProcessLookupError(thread)
            total += times.ran_ns
        # Not every kernel lists them.
        total += sum(_ran_ns(int(child)) for child in read_text(thread / "children").split())
    return total


def waits_for_a_thread(pid: int) -> bool:
    """Return whether a process's first thread waits in a futex, as for locks and gloo. proc(5)."""
    return read_text(Path(f"/proc/{pid}/wchan")).startswith("futex")


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

    `are_grouped`: workers may wait for each other in ways that cannot be seen.
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

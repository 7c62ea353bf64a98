"""Which worker has stopped moving? A pure answer from what the kernel says of it, look by look.

A worker's heartbeat is the processor time that it has used, together with the meetings it has
come to: both stand still when it is stopped, deadlocked or waits for something that never comes,
whatever its program does, and neither costs the worker anything. One that computes for an hour
moves.

Ranks of a process group may wait for each other elsewhere than at meetings. In a job that has one
nobody is ended for standing still as long as anybody moves (see ``deadlocks``).

Invariant: time that passes while the launcher itself stood still (Ctrl-Z, a suspended machine) does
not count.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.launch.deadlocks import IdleWorker, deadlock_message, is_deadlock, to_end
from unisono.workers.control_block import ControlBlock
from unisono.workers.membership import Membership

TIMEOUT_S = 60.0
LOOK_EVERY_S = 1.0
# gloo's wakes a hundred times a second, whether anything comes or not.
_IDLE_THREADS = ("gloo_tcp_loop",)


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a worker.

    Attributes:
        beat: what changes as long as it moves.
        is_stopped: a signal has stopped it.
        is_awaited: others of its membership stand at a meeting to which it has not come.
        place: where it waits for others, as far as that can be seen.
        is_at_meeting: it stands at a meeting itself.
    """

    beat: tuple[int, ...]
    is_stopped: bool
    is_awaited: bool
    place: str = ""
    is_at_meeting: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of a worker after some looks: the last, and how long it has not moved."""

    sight: Observation
    quiet_s: float = 0.0


class Stalled(NamedTuple):
    """A worker that has stalled, what is to be said now, and how it has then ended, in words."""

    rank: int
    message: str
    how: str


def look(
    before: Mapping[int, Watched],
    sights: Mapping[int, Observation],
    passed_s: float,
    *,
    are_grouped: bool = False,
) -> dict[int, Watched]:
    """Take one more look at every worker, `passed_s` seconds after the one before.

    Args:
        before: what is known.
        sights: what is seen.
        passed_s: since the last look.
        are_grouped: they may wait for each other in ways that cannot be seen.
    """
    passed_s = min(passed_s, 2 * LOOK_EVERY_S)
    after = {}
    for rank, sight in sights.items():
        known = before.get(rank)
        holds_up = sight.is_stopped or sight.is_awaited or are_grouped
        same = known is not None and known.sight.beat == sight.beat
        quiet_s = known.quiet_s + passed_s if known is not None and same and holds_up else 0.0
        after[rank] = Watched(sight, quiet_s)
    return after


def stalled(
    watched: Mapping[int, Watched], timeout_s: float, *, are_grouped: bool = False
) -> list[int]:
    """List the workers that have not moved for so long, and are to blame for it themselves."""
    return [
        rank
        for rank, seen in watched.items()
        if seen.quiet_s >= timeout_s and (seen.sight.is_stopped or not are_grouped)
    ]


def processor_time(pid: int) -> tuple[int, bool] | None:
    """Ask the kernel for the nanoseconds a process has run, and whether a signal has stopped it.

    Returns:
        Of all its threads and children together; None when there is no such process. Source:
        proc(5), ``task/[tid]/schedstat``, ``task/[tid]/children`` and ``stat``.
    """
    try:
        ran_ns = _ran_ns(pid)
        # The name before it is in parentheses and may itself hold some.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError, ValueError):
        return None
    return ran_ns, state in "Tt"


def _ran_ns(pid: int) -> int:
    """Add up the time of a process, and of those it waits for: its threads and its children."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if (thread / "comm").read_text().rstrip("\n") not in _IDLE_THREADS:
            total += int((thread / "schedstat").read_text().split()[0])
        children = thread / "children"
        if children.exists():
            total += sum(_ran_ns(int(child)) for child in children.read_text().split())
    return total


def waits_for_a_thread(pid: int) -> bool:
    """Tell whether a process's first thread waits for another thread or process, as far as known.

    Source: proc(5), ``wchan``; locks, and collectives of gloo, wait in the kernel's futexes.
    """
    try:
        return Path(f"/proc/{pid}/wchan").read_text().startswith("futex")
    except OSError:
        return False


class StallWatch:
    """Looks at a job's workers once a second. Final.

    Args:
        control: the control block that they share.
        timeout_s: how long one that others wait for may stand still, in seconds.
    """

    def __init__(self, control: ControlBlock, timeout_s: float) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._watched: dict[int, Watched] = {}
        self._looked_at_s = time.monotonic()

    def at_most(self, timeout_s: float | None) -> float:
        """Say how long a wait may last that should not miss the next look."""
        return LOOK_EVERY_S if timeout_s is None else min(timeout_s, LOOK_EVERY_S)

    def look(
        self,
        pids: Mapping[int, int],
        membership: Membership | None,
        *,
        are_grouped: bool = False,
        is_everybody: bool = False,
        gathering: Collection[int] = (),
    ) -> list[Stalled]:
        """Look, if it is time, at the workers with these processes.

        Args:
            pids: by rank.
            membership: who computes together.
            are_grouped: there has been a process group of several workers.
            is_everybody: no other worker, nor the launcher, has something to do.
            gathering: those of them that wait in ``init_process_group``.

        Returns:
            Those that have stalled; they are then forgotten.
        """
        now_s = time.monotonic()
        if now_s - self._looked_at_s < LOOK_EVERY_S:
            return []
        sights = {rank: self._sight(rank, pid, membership, gathering) for rank, pid in pids.items()}
        seen = {rank: sight for rank, sight in sights.items() if sight is not None}
        passed_s = now_s - self._looked_at_s
        self._watched = look(self._watched, seen, passed_s, are_grouped=are_grouped)
        self._looked_at_s = now_s
        ranks = stalled(self._watched, self._timeout_s, are_grouped=are_grouped)
        if not ranks and are_grouped and is_everybody and seen.keys() == pids.keys():
            return self._deadlocked(pids)
        return [self._told(rank, pids[rank], self._watched.pop(rank)) for rank in ranks]

    def _deadlocked(self, pids: Mapping[int, int]) -> list[Stalled]:
        workers = {
            rank: IdleWorker(watched.quiet_s, watched.sight.place, watched.sight.is_at_meeting)
            for rank, watched in self._watched.items()
        }
        if not is_deadlock(workers, self._timeout_s):
            return []
        rank = to_end(workers)
        quiet_s = self._watched.pop(rank).quiet_s
        how = f"was ended, as all workers waited for each other for {quiet_s:.0f} s"
        return [Stalled(rank, deadlock_message(workers, pids[rank]), how)]

    def _sight(
        self, rank: int, pid: int, membership: Membership | None, gathering: Collection[int]
    ) -> Observation | None:
        seen = processor_time(pid)
        if seen is None:
            return None
        ran_ns, is_stopped = seen
        mine = self._control.lines[rank].arrivals
        others = membership.ranks if membership is not None and rank in membership.ranks else ()
        is_awaited = any(_is_before(mine, self._control.lines[r].arrivals) for r in others)
        is_at_meeting = any(_is_before(self._control.lines[r].arrivals, mine) for r in others)
        count, wait = self._control.wait_of(rank)
        if is_at_meeting:
            place = f"at `{self._control.purpose(rank, mine % 2).decode().rstrip()}`"
        elif rank in gathering:
            place = "in init_process_group"
        else:
            place = "" if wait is None else f"in {wait.decode(errors='replace')}"
        # Whoever waits wakes to look around, which is no sign of life.
        beat = (pid, 0 if place else ran_ns, mine, count)
        if not place and mine and waits_for_a_thread(pid):
            place = "in a collective of torch.distributed, or for a lock"
        return Observation(beat, is_stopped, is_awaited, place, is_at_meeting)

    def _told(self, rank: int, pid: int, watched: Watched) -> Stalled:
        how = (
            "a signal has stopped it (SIGSTOP, or a debugger)"
            if watched.sight.is_stopped
            else "it waits for something that does not come: a lock, a file, a network"
        )
        message = (
            f"worker {rank} (pid {pid}) must move while others wait for it, but has not for "
            f"{watched.quiet_s:.0f} s in step {self._control.lines[rank].step}: {how}. It is "
            f"ended; `--stall-timeout` or `stall_timeout_s` says after how many seconds."
        )
        return Stalled(rank, message, f"was ended, as it stood still for {watched.quiet_s:.0f} s")


def _is_before(count: int, other: int) -> bool:
    return 0 < (other - count) % 2**32 < 2**31

"""Which worker has stopped moving? A pure answer from what the kernel says of it, look by look.

A worker's heartbeat is the processor time that it has used, together with the meetings it has
come to: both stand still when it is stopped, deadlocked or waits for something that never comes,
whatever its program does, and neither costs the worker anything. One that computes for an hour
moves.

Invariant: time that passes while the launcher itself stood still (Ctrl-Z, a suspended machine) does
not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.comm.control import ControlPage
from unisono.comm.crew import Crew

TIMEOUT_S = 60.0
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a worker.

    Attributes:
        beat: what changes as long as it moves.
        is_stopped: a signal has stopped it.
        is_awaited: others of its crew stand at a meeting to which it has not come.
    """

    beat: tuple[int, ...]
    is_stopped: bool
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of a worker after some looks: the last, and how long it has not moved."""

    sight: Sight
    quiet_s: float = 0.0


class Stalled(NamedTuple):
    """A worker that has stalled, what is to be said now, and how it has then ended, in words."""

    rank: int
    message: str
    how: str


def look(
    before: Mapping[int, Watched], sights: Mapping[int, Sight], passed_s: float
) -> dict[int, Watched]:
    """Take one more look at every worker, `passed_s` seconds after the one before."""
    passed_s = min(passed_s, 2 * LOOK_EVERY_S)
    after = {}
    for rank, sight in sights.items():
        known = before.get(rank)
        holds_up = sight.is_stopped or sight.is_awaited
        same = known is not None and known.sight.beat == sight.beat
        quiet_s = known.quiet_s + passed_s if known is not None and same and holds_up else 0.0
        after[rank] = Watched(sight, quiet_s)
    return after


def stalled(watched: Mapping[int, Watched], timeout_s: float) -> list[int]:
    """List the workers that have not moved for so long."""
    return [rank for rank, seen in watched.items() if seen.quiet_s >= timeout_s]


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
        total += int((thread / "schedstat").read_text().split()[0])
        children = thread / "children"
        if children.exists():
            total += sum(_ran_ns(int(child)) for child in children.read_text().split())
    return total


class StallWatch:
    """Looks at a job's workers once a second. Final.

    Args:
        control: the page that they share.
        timeout_s: how long one that others wait for may stand still, in seconds.
    """

    def __init__(self, control: ControlPage, timeout_s: float) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._watched: dict[int, Watched] = {}
        self._looked_at_s = time.monotonic()

    def at_most(self, timeout_s: float | None) -> float:
        """Say how long a wait may last that should not miss the next look."""
        return LOOK_EVERY_S if timeout_s is None else min(timeout_s, LOOK_EVERY_S)

    def look(self, pids: Mapping[int, int], crew: Crew | None) -> list[Stalled]:
        """Look, if it is time, at the workers with these processes.

        Returns:
            Those that have stalled; they are then forgotten.
        """
        now_s = time.monotonic()
        if now_s - self._looked_at_s < LOOK_EVERY_S:
            return []
        sights = {rank: self._sight(rank, pid, crew) for rank, pid in pids.items()}
        seen = {rank: sight for rank, sight in sights.items() if sight is not None}
        self._watched = look(self._watched, seen, now_s - self._looked_at_s)
        self._looked_at_s = now_s
        ranks = stalled(self._watched, self._timeout_s)
        return [self._told(rank, pids[rank], self._watched.pop(rank)) for rank in ranks]

    def _sight(self, rank: int, pid: int, crew: Crew | None) -> Sight | None:
        seen = processor_time(pid)
        if seen is None:
            return None
        ran_ns, is_stopped = seen
        mine = self._control.arrivals(rank)
        others = crew.ranks if crew is not None and rank in crew.ranks else ()
        is_awaited = any(0 < (self._control.arrivals(r) - mine) % 2**32 < 2**31 for r in others)
        return Sight((pid, ran_ns, mine), is_stopped, is_awaited)

    def _told(self, rank: int, pid: int, watched: Watched) -> Stalled:
        how = (
            "a signal has stopped it (SIGSTOP, or a debugger)"
            if watched.sight.is_stopped
            else "it waits for something that does not come: a lock, a file, a network"
        )
        message = (
            f"worker {rank} (pid {pid}) must move while others wait for it, but has not for "
            f"{watched.quiet_s:.0f} s in step {self._control.step(rank)}: {how}. It is ended; "
            f"`--stall-timeout` or `stall_timeout_s` says after how many seconds."
        )
        return Stalled(rank, message, f"was ended, as it stood still for {watched.quiet_s:.0f} s")

"""Who looks at the workers once a second? The launcher, in /proc and in their control block.

It decides nothing: who has stalled is said by ``stalls``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from unisono.hangs.looking import is_before
from unisono.launch import stalls
from unisono.launch.stalls import LOOK_EVERY_S, Observation
from unisono.procfs import read_stat, read_text, thread_times
from unisono.workers.control_block import ControlBlock
from unisono.workers.membership import Membership

# gloo's wakes a hundred times a second, whether anything comes or not.
_IDLE_THREADS = ("gloo_tcp_loop",)


class Stalled(NamedTuple):
    """A worker that is to be killed, what to say of it now, and how it has then ended, in words."""

    rank: int
    message: str
    how: str


class StallWatch:
    """Looks at a job's workers once a second. Final.

    Args:
        control: the control block that they share.
        timeout_s: how long one that others wait for may stand still, in seconds.
    """

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
        """Look, if it is time, at the workers with these processes.

        Args:
            pids: by rank.
            membership: who computes together.
            are_grouped: there has been a process group of several workers.
            is_everybody: no other worker, nor the launcher, has something to do.

        Returns:
            Those that have stalled; they are then forgotten.
        """
        now_s = time.monotonic()
        passed_s = now_s - self._looked_at_s
        if passed_s < LOOK_EVERY_S:
            return []
        looks = {rank: self._observe(rank, pids[rank], membership) for rank in pids}
        seen = {rank: look for rank, look in looks.items() if look is not None}
        self._seen = stalls.look(self._seen, seen, passed_s, are_grouped=are_grouped)
        self._looked_at_s = now_s
        ranks = stalls.stalled(self._seen, self._timeout_s, are_grouped=are_grouped)
        if not ranks and are_grouped and is_everybody and seen.keys() == pids.keys():
            return self._deadlocked(pids)
        return [self._stalled(rank, pids[rank]) for rank in ranks]

    def _stalled(self, rank: int, pid: int) -> Stalled:
        worker = self._seen.pop(rank)
        message = stalls.stall_message(rank, pid, self._control.lines[rank].step, worker)
        return Stalled(rank, message, f"was ended, as it stood still for {worker.quiet_s:.0f} s")

    def _deadlocked(self, pids: Mapping[int, int]) -> list[Stalled]:
        if not stalls.is_deadlock(self._seen, self._timeout_s):
            return []
        rank = stalls.worker_to_kill(self._seen)
        message = stalls.deadlock_message(self._seen, pids[rank])
        quiet_s = self._seen.pop(rank).quiet_s
        how = f"was ended, as all workers waited for each other for {quiet_s:.0f} s"
        return [Stalled(rank, message, how)]

    def _observe(self, rank: int, pid: int, membership: Membership | None) -> Observation | None:
        time_and_state = processor_time(pid)
        if time_and_state is None:
            return None
        ran_ns, is_stopped = time_and_state
        mine = self._control.lines[rank].arrivals
        others = membership.ranks if membership is not None and rank in membership.ranks else ()
        is_awaited = any(is_before(mine, self._control.lines[r].arrivals) for r in others)
        is_at_meeting = any(is_before(self._control.lines[r].arrivals, mine) for r in others)
        count, wait = self._control.wait_of(rank)
        if is_at_meeting:
            place = f"at `{self._control.lines[rank].purposes[mine % 2].value.decode().rstrip()}`"
        else:
            place = "" if wait is None else f"in {wait.decode(errors='replace')}"
        # A worker that waits wakes up now and then, which is no sign of life.
        beat = (pid, 0 if place else ran_ns, mine, count)
        if not place and mine and waits_for_a_thread(pid):
            place = "in a collective of torch.distributed, or for a lock"
        return Observation(beat, is_stopped, is_awaited, place, is_at_meeting)


def processor_time(pid: int) -> tuple[int, bool] | None:
    """Ask the kernel for the nanoseconds a process has run, and whether a signal has stopped it.

    Returns:
        Of all its threads and children together; None when there is no such process. Source:
        proc(5), ``task/[tid]/schedstat`` and ``task/[tid]/children``.
    """
    try:
        ran_ns = _ran_ns(pid)
    except (OSError, ValueError):
        return None
    stat = read_stat(pid)
    return None if stat is None else (ran_ns, stat.is_stopped)


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
    """Tell whether a process's first thread waits for another thread or process, as far as known.

    Source: proc(5), ``wchan``; locks, and collectives of gloo, wait in the kernel's futexes.
    """
    return read_text(Path(f"/proc/{pid}/wchan")).startswith("futex")

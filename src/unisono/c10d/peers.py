"""Which ranks of the group are still there: their processes, and how they left.

A rank that leaves, or gives up, marks its line and wakes whoever sleeps. A killed one cannot: its
process is watched through a pidfd, opened while all are certainly there, so that it can never
refer to a later process with the same number.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import weakref
from collections.abc import Iterable, Sequence

from unisono.c10d.group_memory import (
    ARRIVALS,
    DEPARTURE,
    DOORBELL,
    PID,
    REASON,
    REASON_BYTES,
    GroupMemory,
)


class RankExit(enum.IntEnum):
    """What a rank said about itself when it left."""

    PRESENT = 0
    LEFT = 1
    GAVE_UP = 2


class Peers:
    """The other ranks' processes as one rank sees them. Final.

    Args:
        region: the group's memory.
        rank: this rank in the group.
        names: each rank of the group as the program knows it, its global rank.
    """

    def __init__(self, region: GroupMemory, rank: int, names: Sequence[int]) -> None:
        self._pidfds: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._pidfds).atexit = False
        self._region = region
        self._layout = region.layout
        self.rank = rank
        self.names = names
        self._dead: set[int] = set()
        self.has_left = False
        self.why_left = ""
        region.set_word(self._layout.line(rank) + PID, os.getpid())

    def watch(self) -> None:
        """Open pidfds of the other ranks whose processes are known by now."""
        for other in range(len(self.names)):
            pid = self._pid(other)
            if other == self.rank or not pid or other in self._pidfds or other in self._dead:
                continue
            try:
                self._pidfds[other] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(other)

    def first_lost(self, ranks: Iterable[int]) -> tuple[int, str] | None:
        """Find one of `ranks` that will never come, and the reason; dead ones first."""
        lost: tuple[int, str] | None = None
        for other in ranks:
            if self._is_dead(other):
                return other, f"its process {self._pid(other)} has ended"
            how = self._region.word(self._layout.line(other) + DEPARTURE)
            if how == RankExit.LEFT:
                lost = other, "it has destroyed the process group"
            elif how == RankExit.GAVE_UP and lost is None:
                lost = other, f'it has given up, saying "{self._reason(other)}"'
        return lost

    def leave(self, how: RankExit, reason: str = "") -> None:
        """Tell the others that this rank will not come again, and why."""
        self.has_left, self.why_left = True, reason
        line = self._layout.line(self.rank)
        text = reason.encode()[: REASON_BYTES - 1].ljust(REASON_BYTES, b"\0")
        self._region.memory.write(line + REASON, text)
        self._region.set_word(line + DEPARTURE, int(how))
        self._region.wake(line + ARRIVALS)
        for other in range(len(self.names)):
            self._region.wake(self._layout.line(other) + DOORBELL)

    def close(self) -> None:
        """Stop watching; this also happens when the object is collected."""
        _close_all(self._pidfds)

    def _pid(self, rank: int) -> int:
        return self._region.word(self._layout.line(rank) + PID)

    def _is_dead(self, rank: int) -> bool:
        pidfd = self._pidfds.get(rank)
        if pidfd is not None:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            # POLLIN when it has ended; with POLLHUP once its parent has taken note of that.
            if any(event & select.POLLIN for _, event in poll.poll(0)):
                self._dead.add(rank)
        return rank in self._dead

    def _reason(self, rank: int) -> str:
        text = self._region.memory.read(self._layout.line(rank) + REASON, REASON_BYTES)
        return text.rstrip(b"\0").decode(errors="replace")


def _close_all(pidfds: dict[int, int]) -> None:
    while pidfds:
        with contextlib.suppress(OSError):
            os.close(pidfds.popitem()[1])

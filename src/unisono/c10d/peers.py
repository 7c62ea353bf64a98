"""Which ranks of the group are still there, and how they left.

A rank that leaves, or gives up, marks its seat and wakes whoever sleeps. A killed one cannot: its
process is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from unisono.c10d.group_memory import DOORBELL, REASON, REASON_BYTES, GroupMemory
from unisono.workers.meeting_point import Departure
from unisono.workers.proc import started_at

# A death tells more than a rank that has left, and that more than one that has given up.
_TELLING = (Departure.DIED, Departure.FINISHED, Departure.FAILED)


class Peers:
    """The other ranks as one rank sees them. Final.

    Args:
        region: the group's memory.
        rank: this rank in the group.
        names: each rank of the group as the program knows it, its global rank.
    """

    def __init__(self, region: GroupMemory, rank: int, names: Sequence[int]) -> None:
        self._region = region
        self.rank = rank
        self.names = names
        self.has_left = False
        self.why_left = ""
        region.seats[rank].take(os.getpid(), started_at(os.getpid()) or 0)

    def lost(self, ranks: Iterable[int]) -> list[tuple[int, Departure]]:
        """Find those of `ranks` that will never come, most telling first."""
        seats = self._region.seats
        found = [
            (rank, Departure.DIED if seats[rank].has_died else Departure(seats[rank].departure))
            for rank in ranks
        ]
        gone = [one for one in found if one[1] != Departure.PRESENT]
        return sorted(gone, key=lambda one: _TELLING.index(one[1]))

    def why(self, rank: int, how: Departure) -> str:
        """Say why a rank will never come."""
        if how == Departure.DIED:
            return f"its process {self._region.seats[rank].pid} has ended"
        if how == Departure.FINISHED:
            return "it has destroyed the process group"
        place = self._region.layout.line(rank) + REASON
        text = self._region.memory.read(place, REASON_BYTES).rstrip(b"\0")
        return f'it has given up, saying "{text.decode(errors="replace")}"'

    def leave(self, how: Departure, reason: str = "") -> None:
        """Tell the others that this rank will not come again, and why."""
        self.why_left, self.has_left = reason, True
        text = reason.encode()[: REASON_BYTES - 1].ljust(REASON_BYTES, b"\0")
        self._region.memory.write(self._region.layout.line(self.rank) + REASON, text)
        self._region.seats[self.rank].leave(how)
        for other in range(len(self.names)):
            self._region.wake(self._region.layout.line(other) + DOORBELL)

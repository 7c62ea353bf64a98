"""The control block of one of several hosts, with lines for the workers of other hosts.

The workers of this host share it as on a single host. The line and mailbox of a worker on another
host arrive with its next arrival, in memory private to each process: it replaces nothing newer.
"""

from __future__ import annotations

import ctypes
from typing import final

from unisono.runtime.workers.control_block import ControlBlock, RankLine
from unisono.runtime.workers.host_links import HostLinks
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.rendezvous import RankPlaces

# What other hosts need of a line: not the current wait, which only its own host reports.
_TOLD_BYTES = RankLine.num_waits.offset
_SIZE_BYTES = 8


@final
class HostsControlBlock(ControlBlock):
    """A control block that sends this worker's line to other hosts.

    `fd` is the memory of this host's workers. `are_replaced`: whether dead workers are replaced.
    """

    can_spin = False

    def __init__(self, fd: int, places: RankPlaces, *, are_replaced: bool = False) -> None:
        here = places.local_ranks
        super().__init__(fd, len(here))
        self.world_size = places.world_size
        self._rank, self._links = places.rank, HostLinks({})
        self._mail, self._put = b"", [b"", b""]
        self._came: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self._dead = Departure.LOST if are_replaced else Departure.DIED
        # Mapped for this process only.
        self._far_ranks = frozenset(range(places.world_size)) - frozenset(here)
        own, self.lines = self.lines, ControlBlock(-1, places.world_size).lines
        self.lines[here[0] : here[-1] + 1] = own
        self._far = [self.lines[rank] for rank in self._far_ranks]

    def connect(self, links: HostLinks) -> None:
        """Use new links to other hosts, before the first barrier."""
        self._links.close()
        self._links = links

    def leave(self, rank: int, how: Departure) -> None:
        """Mark that `rank` has left; publish it if it is this worker."""
        super().leave(rank, how)
        if rank == self._rank:
            self.send_line()

    def receive(self, timeout_s: float = 0.0) -> None:
        """Receive the lines of workers on other hosts, and mark workers that are lost."""
        for rank, said in self._links.receive(timeout_s):
            if isinstance(said, bytes):
                self._store_line(rank, said)
            elif self.departure(rank) == Departure.PRESENT:
                self.leave(rank, self._dead if said == Departure.DIED else said)

    @property
    def wish(self) -> int:
        """Whether any host's launcher wishes that all workers stop."""
        return int(self.head.wish or max((line.wish for line in self._far), default=0))

    def is_far(self, rank: int) -> bool:
        """Return whether a worker is on another host."""
        return rank in self._far_ranks

    def post(self, rank: int, message: bytes) -> None:
        """Store a message in the mailbox of `rank`, and send it with the next arrival."""
        super().post(rank, message)
        self._mail = message

    def attach(self, which: int, data: bytes) -> None:
        """Send bytes to other hosts with the next arrival of that parity."""
        self._put[which] = data

    def attached(self, which: int) -> dict[int, bytes]:
        """Return and remove what other hosts sent with an arrival, by rank."""
        came = dict(self._came[which])
        self._came[which].clear()
        return came

    def send_line(self) -> None:
        """Send this worker's line, new mail and extra bytes to all other hosts."""
        line = self.lines[self._rank]
        line.wish = self.head.wish
        which = line.arrivals % 2
        mail, self._mail = self._mail, b""
        beside, self._put[which] = self._put[which], b""
        num_bytes = len(mail).to_bytes(_SIZE_BYTES, "little")
        told = ctypes.string_at(ctypes.addressof(line), _TOLD_BYTES)
        self._links.send(told + num_bytes + mail + beside)

    def _store_line(self, rank: int, said: bytes) -> None:
        line, mail_at = self.lines[rank], _TOLD_BYTES + _SIZE_BYTES
        end = mail_at + int.from_bytes(said[_TOLD_BYTES:mail_at], "little")
        if end > mail_at:
            super().post(rank, said[mail_at:end])
        ctypes.memmove(ctypes.addressof(line), said, _TOLD_BYTES)
        if len(said) > end:
            self._came[line.arrivals % 2][rank] = said[end:]

"""One bucket of a lane on its way between hosts. Whatever crosses a network begins and ends here.

::

    workers' parts ──► part of the host ─┐         ┌─► slice 0 of all, added ─┐      ┌─► sums
                          (in tree order)│  swap   │       in tree order      │ swap │
    the same on another host  ───────────┘         └─► slice 1 of all, added ─┘      └─► sums

Parts of hosts are made in memory of their own, so workers' parts stay as they are: where one has
changed meanwhile, all can cross again. Beside its slices, a host's part says which parameters it
has gradients for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.engine.exchange.arena import Arena, Region, size_of
from unisono.engine.exchange.bucket_pipeline import ParameterBucket, Rounds
from unisono.engine.exchange.host_lane import HostLane
from unisono.engine.exchange.parts import OrderedSum, pieces_within, presence
from unisono.plan.shards import Piece
from unisono.plan.summation import Node, within
from unisono.runtime.workers.memory import Memory, aligned

_ROUNDS = 2


class LaneMemory:
    """What this worker adds up of a lane: parts of this host, and the sums of all. Final.

    Args:
        arena: where the parts of this host's workers are.
        held: the parts of each host.
        host: which one this is.
        parts: those of all workers.
        totals, totals_at: where the sums of all go, laid out as a part from this byte on.
    """

    def __init__(
        self,
        arena: Arena,
        held: Sequence[Sequence[Node]],
        host: int,
        parts: Sequence[Node],
        totals: Memory,
        totals_at: int,
    ) -> None:
        self.arena, self.held, self.host = arena, held, host
        self.totals, self.totals_at = totals, totals_at
        self.within = {part: within(part, parts) for part in held[host]}
        num_bytes = size_of(arena.plan.parameters)
        self._sums = {
            part: Memory.private(num_bytes) for part, inner in self.within.items() if len(inner) > 1
        }

    def of(self, part: Node) -> tuple[Memory, int]:
        """Say where a part of this host is: in which memory, and its first byte."""
        if part in self._sums:
            return self._sums[part], 0
        return self.arena.memory, self.arena.gradients[part.lo].start


class HostBucket:
    """One bucket, of which each host adds up a slice. Final.

    Args:
        bucket: which parameters.
        number: which bucket of the lane.
    """

    def __init__(self, bucket: ParameterBucket, number: int, memory: LaneMemory) -> None:
        self._bucket, self._number, self._memory = bucket, number, memory
        self._hosts = [host for host in range(len(memory.held)) if host != memory.host]
        self._turn = 0
        end, length = aligned(bucket.num_bytes), bucket.slice_bytes(len(memory.held))
        starts = range(0, length * len(memory.held), length)
        self._bounds = [(min(start, end), min(start + length, end)) for start in starts]
        self._flags = {
            part.lo: bytearray(1 + len(bucket.indices)) for parts in memory.held for part in parts
        }
        self._received = self._room()
        self._workers_parts = _WorkersParts(memory.arena, bucket)
        pieces = list(pieces_within(bucket.slots, 0, end))
        self._host_sums = [
            OrderedSum(self._workers_parts, inner, pieces, self.views(part.lo, pieces))
            for part, inner in memory.within.items()
            if len(inner) > 1
        ]
        mine = list(pieces_within(bucket.slots, *self._bounds[memory.host]))
        totals = Region(memory.totals, memory.totals_at + bucket.start, bucket.slots)
        self._sum = OrderedSum(
            self,
            [part for parts in memory.held for part in parts],
            mine,
            totals.pieces(mine),
        )

    def expect(self, lane: HostLane, turn: int) -> None:
        """Say where what comes in a turn is to go, before any of it can come.

        Args:
            turn: which exchange of all buckets it is, counted over the lane's life.
        """
        self._turn, (slices, sums) = turn, self._frames(turn)
        lane.expect(slices, {host: self._of_host(host) for host in self._hosts})
        lane.expect(sums, {host: [self._totals(host)] for host in self._hosts})

    def transfer(self, lane: HostLane) -> Rounds:
        """See :class:`~.bucket_pipeline.BucketTransfer`: slices to each host, then sums to all."""
        memory, (slices, sums) = self._memory, self._frames(self._turn)
        self._make_parts()
        yield lane.swap(slices, {host: self._for_host(host) for host in self._hosts})
        self._sum.add()
        return lane.swap(sums, {host: [self._totals(memory.host)] for host in self._hosts})

    def flags(self, lo: int) -> bytes:
        """See :class:`~.parts.PublishedParts`; parameters are counted from the bucket's first."""
        return bytes(self._flags[lo])

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """See :class:`~.parts.PublishedParts`: this host's slice of a part."""
        return self._region(lo).pieces(pieces)

    def _frames(self, turn: int) -> tuple[int, int]:
        first = (turn << 32) + _ROUNDS * self._number
        return first, first + 1

    def _room(self) -> dict[int, Memory]:
        """Take memory for this host's slice of each part of other hosts."""
        start, stop = self._bounds[self._memory.host]
        return {
            part.lo: Memory.private(stop - start)
            for host in self._hosts
            for part in self._memory.held[host]
        }

    def _region(self, lo: int) -> Region:
        if lo in self._received:
            start, _ = self._bounds[self._memory.host]
            return Region(self._received[lo], -start, self._bucket.slots)
        part = next(part for part in self._memory.within if part.lo == lo)
        memory, first = self._memory.of(part)
        return Region(memory, first + self._bucket.start, self._bucket.slots)

    def _make_parts(self) -> None:
        """Add up this host's parts, and say which parameters they have gradients for."""
        for own in self._host_sums:
            own.add()
        for part, inner in self._memory.within.items():
            rows = [presence(self._workers_parts.flags(one.lo)) for one in inner]
            self._flags[part.lo][1:] = bytes(any(column) for column in zip(*rows, strict=True))

    def _of_host(self, host: int) -> list[memoryview]:
        """View what another host sends of its parts."""
        parts = self._memory.held[host]
        slices = [
            self._received[part.lo].view(0, self._length(self._memory.host)) for part in parts
        ]
        return slices + [memoryview(self._flags[part.lo])[1:] for part in parts]

    def _for_host(self, host: int) -> list[memoryview]:
        """View what is sent to another host of this one's parts."""
        start, _ = self._bounds[host]
        slices, flags = [], []
        for part in self._memory.within:
            memory, first = self._memory.of(part)
            slices.append(memory.view(first + self._bucket.start + start, self._length(host)))
            flags.append(memoryview(self._flags[part.lo])[1:])
        return slices + flags

    def _totals(self, host: int) -> memoryview:
        """View the sums that one host makes."""
        start, _ = self._bounds[host]
        memory, first = self._memory, self._memory.totals_at + self._bucket.start
        return memory.totals.view(first + start, self._length(host))

    def _length(self, host: int) -> int:
        start, stop = self._bounds[host]
        return stop - start


class _WorkersParts:
    """One bucket of parts that workers of this host have published. Final.

    Args:
        bucket: which parameters; they are counted from its first.
    """

    def __init__(self, arena: Arena, bucket: ParameterBucket) -> None:
        self._arena, self._bucket = arena, bucket

    def flags(self, lo: int) -> bytes:
        return self._bucket.flags(self._arena.flags[lo])

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        start = self._arena.gradients[lo].start + self._bucket.start
        return Region(self._arena.memory, start, self._bucket.slots).pieces(pieces)

"""Exchange one bucket of a lane between hosts.

::

    workers' parts ──► part of the host ─┐         ┌─► slice 0 of all, added ─┐      ┌─► sums
                          (in tree order)│  swap   │       in tree order      │ swap │
    the same on another host  ───────────┘         └─► slice 1 of all, added ─┘      └─► sums

The part of a host is computed in separate memory, so the workers' parts are kept: if one changes
meanwhile, all can be exchanged again. With its slices a host sends which parameters have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from unisono.engine.exchange.arena import Arena, Region, size_of
from unisono.engine.exchange.bucket_pipeline import ParameterBucket, Rounds
from unisono.engine.exchange.host_lane import HostLane
from unisono.engine.exchange.parts import OrderedSum, PublishedParts, pieces_within, presence
from unisono.plan.summation import Node, within
from unisono.runtime.workers.memory import Memory, aligned

_ROUNDS = 2


@final
class LaneMemory:
    """The data of a lane that this worker adds up: this host's parts, and the sums.

    Args:
        held: the parts of each host.
        host: the index of this host.
        parts: the parts of all workers.
    """

    def __init__(
        self, arena: Arena, held: Sequence[Sequence[Node]], host: int, parts: Sequence[Node]
    ) -> None:
        self.arena, self.held, self.host = arena, held, host
        self.within = {part: within(part, parts) for part in held[host]}
        num_bytes = size_of(arena.plan.parameters)
        self._sums = {
            part: Memory.private(num_bytes) for part, inner in self.within.items() if len(inner) > 1
        }

    def of(self, part: Node) -> tuple[Memory, int]:
        """Return the memory of a part of this host, and its first byte there."""
        if part in self._sums:
            return self._sums[part], 0
        return self.arena.memory, self.arena.gradients[part.lo].start

    def region(self, part: Node, bucket: ParameterBucket) -> Region:
        """View a bucket of a part of this host."""
        memory, first = self.of(part)
        return Region(memory, first + bucket.start, bucket.slots)


@final
class HostBucket:
    """One bucket, of which each host adds up a slice; `number` is its position in the lane."""

    _frames: tuple[int, int]  # what slices and sums of a turn are numbered

    def __init__(self, bucket: ParameterBucket, number: int, memory: LaneMemory) -> None:
        self._bucket, self._number, self._memory = bucket, number, memory
        held, arena = memory.held, memory.arena
        self._hosts = [host for host in range(len(held)) if host != memory.host]
        end, length = aligned(bucket.num_bytes), bucket.slice_bytes(len(held))
        starts = range(0, length * len(held), length)
        self._bounds = [(min(start, end), min(start + length, end)) for start in starts]
        start, stop = self._bounds[memory.host]
        nodes = [node for nodes in held for node in nodes]
        self._flags = {node: memoryview(bytearray(1 + len(bucket.indices))) for node in nodes}
        self._received = {
            node: Memory.private(stop - start) for host in self._hosts for node in held[host]
        }
        regions = [
            # Addressed as if the whole bucket were there; only this host's slice is.
            Region(self._received[node], -start, bucket.slots)
            if node in self._received
            else memory.region(node, bucket)
            for node in nodes
        ]
        mine = list(pieces_within(bucket.slots, start, stop))
        totals = Region(arena.memory, arena.sums.start + bucket.start, bucket.slots)
        published = PublishedParts(nodes, [(self._flags[node],) for node in nodes], regions)
        self._sum = OrderedSum(published, mine, totals.pieces(mine))
        self._inner = {
            node: PublishedParts(
                inner,
                [bucket.row(arena.flags[one.lo]) for one in inner],
                [
                    Region(arena.memory, arena.gradients[one.lo].start + bucket.start, bucket.slots)
                    for one in inner
                ],
            )
            for node, inner in memory.within.items()
        }
        pieces = list(pieces_within(bucket.slots, 0, end))
        self._host_sums = [
            OrderedSum(inner, pieces, memory.region(node, bucket).pieces(pieces))
            for node, inner in self._inner.items()
            if len(inner.nodes) > 1
        ]

    def expect(self, lane: HostLane, turn: int) -> None:
        """Register where to store the data of a turn, before any of it can arrive."""
        first, held = (turn << 32) + _ROUNDS * self._number, self._memory.held
        self._frames = slices, sums = first, first + 1
        own = self._length(self._memory.host)
        for host in self._hosts:
            places = [self._received[node].view(0, own) for node in held[host]]
            lane.expect(slices, {host: places + [self._flags[node][1:] for node in held[host]]})
        lane.expect(sums, {host: [self._totals(host)] for host in self._hosts})

    def transfer(self, lane: HostLane) -> Rounds:
        """Send slices to each host, then sums to all."""
        slices, sums = self._frames
        for own in self._host_sums:
            own.add()
        for node, inner in self._inner.items():
            rows = [presence(b"".join(row)) for row in inner.rows]
            self._flags[node][1:] = bytes(any(column) for column in zip(*rows, strict=True))
        yield lane.swap(slices, {host: self._for_host(host) for host in self._hosts})
        self._sum.add()
        return lane.swap(sums, {host: [self._totals(self._memory.host)] for host in self._hosts})

    def _for_host(self, host: int) -> list[memoryview]:
        """View the slices of this host's parts that are sent to another host."""
        memory, start = self._memory, self._bucket.start + self._bounds[host][0]
        slices = [
            place.view(first + start, self._length(host))
            for place, first in map(memory.of, memory.within)
        ]
        return slices + [self._flags[node][1:] for node in memory.within]

    def _totals(self, host: int) -> memoryview:
        arena, start = self._memory.arena, self._bucket.start + self._bounds[host][0]
        return arena.memory.view(arena.sums.start + start, self._length(host))

    def _length(self, host: int) -> int:
        start, stop = self._bounds[host]
        return stop - start

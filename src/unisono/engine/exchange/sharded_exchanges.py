"""The exchanges of replicas whose workers have the optimizer state of their pieces alone.

As ``staged.py``::

    worker 0   parts ──►┌────────┐──► its pieces of all parts, added, updated ──►┌────────┐
                        │ host's │                                               │ host's │──► all
    worker 1   parts ──►│ memory │──► its pieces of all parts, added, updated ──►│ memory │
                        └────────┘                                               └────────┘
                    gather: all meet                                         share: all meet

Sums lie where parts were, so they take no room, unless something asks for all of them.

On several hosts the state is divided among the workers of each host: lane i adds up with the other
hosts and updates, with the same bits on every host, so parameters cross no network.

As ``group_exchange.py``::

    worker 0   parts ─┐            ┌─► its slices, added, updated ─┐            ┌─► all
                      │ all_to_all │                               │ all_gather │   parameters
    worker 1   parts ─┘            └─► its slices, added, updated ─┘            └─►

What is given to all are parameters, in the place of sums: as many bytes, but behind the update.
Sums lie where slices were received, so they take no room, unless something asks for all of them.

Slices begin at multiples of 1,024 elements of each parameter, as updates need (``plan/shards.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from unisono.engine.exchange.arena import Block, Bytes, Region, Slot, private_bytes, within
from unisono.engine.exchange.bucket_pipeline import (
    BucketLayout,
    BucketPipeline,
    ParameterBucket,
    Rounds,
    lay_out_buckets,
)
from unisono.engine.exchange.communicator import Communicator
from unisono.engine.exchange.group_exchange import GroupExchange
from unisono.engine.exchange.hosts_exchange import StagedHostsExchange
from unisono.engine.exchange.parts import OrderedSum
from unisono.engine.exchange.sharded import ShardedExchange
from unisono.engine.exchange.staged import FetchedParts, StagedExchange
from unisono.plan.shards import CUT_ELEMENTS, Piece
from unisono.plan.summation import Node
from unisono.runtime.workers.memory import ALIGNMENT_BYTES


class ShardedStagedExchange(ShardedExchange, StagedExchange):
    """An exchange of replicas; arguments as of :class:`~.protocol.Exchange`."""

    _fetched: FetchedParts | None = None

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`~.protocol.Exchange`; meets nobody."""
        if self._fetched is not None:
            self._fetched.fetch()
        return self._sum.add()

    def all_sums(self, purpose: str) -> bool:
        """See :class:`~.protocol.Exchange`."""
        self._view_whole(self._all_sums())
        for place, total in zip(self._sums_of_pieces, self.totals, strict=True):
            self.copies.to_host(place, total)
        self.copies.wait()
        if not self._team.meet(purpose):
            return False
        for there, here in self._within(self._sums_there, self._sums_memory, 0, self._num_bytes):
            self.copies.to_device(here, there)
        return True

    def are_read(self, purpose: str) -> bool:
        """See :class:`~.protocol.Exchange`; what was changed in all sums is in this worker's."""
        for total, there in zip(self.totals, self._sums.pieces(self.pieces), strict=True):
            total.copy_(there)
        self.copies.wait()
        return self._team.meet(purpose)

    def share(self, purpose: str) -> bool:
        """See :class:`~.protocol.Exchange`; hands the parameters round."""
        there, here, (start, stop) = self._parameters_there, self._parameters_memory, self._mine
        for place, source in self._within(there, here, start, stop):
            self.copies.to_host(place, source)
        self.copies.wait()
        if not self._team.meet(purpose):
            return False
        for first, last in ((0, start), (stop, self._num_bytes)):
            for source, place in self._within(there, here, first, last):
                self.copies.to_device(place, source)
        return True

    def _release_parts(self) -> None:
        super()._release_parts()
        for block in self._fetched.blocks.values() if self._fetched is not None else ():
            block.release()

    def _room(self) -> Region:
        arena = self.memory.arena
        self._parameters_there = arena.parameters.everything()
        self._pinned.pin(self._parameters_there)
        self._parameters_memory = private_bytes(self._num_bytes, self.device, self._divided)
        return Region(self._parameters_memory, 0, arena.plan.parameters)

    def _plan_sum(self) -> None:
        self._take_pieces(self._cut(self._team.size)[self._team.position])
        self._fetched = None if self.device.is_host else self._fetched_parts()
        self._sum = OrderedSum(self._fetched or self._parts, self.division.parts, self.pieces)
        self.totals = self._sum.totals
        self._hold_state()

    def _take_pieces(self, pieces: Sequence[Piece]) -> None:
        sums, slots = self.memory.arena.sums, self.memory.arena.plan.parameters
        self.pieces, self._sums_of_pieces = pieces, sums.pieces(pieces)
        places = [slots[p.index].offset + slots[p.index].dtype.itemsize * p.start for p in pieces]
        sizes = [total.nbytes for total in self._sums_of_pieces]
        self._mine = (places[0], places[-1] + sizes[-1]) if pieces else (0, 0)
        # Some bytes even if they have no elements, as these must be on their device, too.
        start = max(0, min(self._mine[0], self._num_bytes - ALIGNMENT_BYTES))
        self._slice = start, max(self._mine[1], start + ALIGNMENT_BYTES)


class ShardedStagedHostsExchange(ShardedStagedExchange, StagedHostsExchange):
    """An exchange between hosts. Final; arguments as of :class:`~.protocol.Exchange`."""

    _here: Block | None  # where the sums of this worker's pieces are on its device

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`~.protocol.Exchange`."""
        present = self._all_reduce.finish()
        if self._here is not None:
            for source, place in self._within(self._sums_there, self._here, *self._mine):
                self.copies.to_device(place, source)
        return present

    def _plan_sum(self) -> None:
        arena, all_reduce = self.memory.arena, self._all_reduce
        lanes = self._cut(all_reduce.num_lanes)
        all_reduce.plan(self.division, lanes, (arena.memory, arena.sums.start))
        self._take_pieces([] if all_reduce.number is None else lanes[all_reduce.number])
        self.totals, self._here = self._sums_of_pieces, None
        if not self.device.is_host:
            self._pinned.pin(self._sums_there)
            self._here = Block([*within(self._spans, *self._slice)])
            self.totals = Region(self._here, 0, arena.plan.parameters).pieces(self.pieces)
        self._hold_state()


class ShardedGroupExchange(ShardedExchange, GroupExchange):
    """An exchange of replicas. Final; arguments as of :class:`~.protocol.Exchange`."""

    gives_sums = False

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`~.protocol.Exchange`; the sums of this worker's pieces are here then."""
        more = super().gather(purpose)
        if more is None and self._communicator is not None:
            self._communicator.catch_up()
        return more

    def all_sums(self, purpose: str) -> bool:
        """See :class:`~.protocol.Exchange`."""
        if self._pipeline is None:
            return True
        self.whole = self._all_sums.tensors()
        torch._foreach_copy_(self._all_sums.pieces(self.pieces), [*self.totals])
        return self._give(self._sums_memory)

    def are_read(self, purpose: str) -> bool:
        """See :class:`~.protocol.Exchange`; what was changed in all sums is in this worker's."""
        if self._pipeline is not None:
            torch._foreach_copy_([*self.totals], self._all_sums.pieces(self.pieces))
        return True

    def share(self, purpose: str) -> bool:
        """See :class:`~.protocol.Exchange`; gives the parameters to all."""
        if self._pipeline is None:
            return self._team.meet(purpose)
        return self._give(self._parameters_memory)

    def _lay_out(self, slots: Sequence[Slot]) -> BucketLayout:
        unit = CUT_ELEMENTS * max(slot.dtype.itemsize for slot in slots)
        return lay_out_buckets(slots, self._team.world.world_size, unit=unit)

    def _room(self) -> Region:
        self._parameters_memory = private_bytes(self._layout.num_bytes, self.device)
        return Region(self._parameters_memory, 0, self._layout.slots)

    @functools.cached_property
    def _sums_memory(self) -> Bytes:
        return private_bytes(self._layout.num_bytes, self.device)

    @property
    def _all_sums(self) -> Region:
        return Region(self._sums_memory, 0, self._layout.slots)

    def _plan_sum(self) -> None:
        self.pieces = [Piece(n, 0, p.numel()) for n, p in enumerate(self.parameters)]
        super()._plan_sum()
        self._hold_state()

    def _give(self, memory: Bytes) -> bool:
        """Give everybody this worker's slices; False if somebody was lost. Collective."""
        position, size = self._team.position, self._team.size
        slices = [_GivenSlice(bucket, memory, position, size) for bucket in self._layout.buckets]
        return self._settle(BucketPipeline(slices))


class _GivenSlice:
    """A slice of a bucket that goes to all. Final."""

    def __init__(self, bucket: ParameterBucket, memory: Bytes, position: int, size: int) -> None:
        length = bucket.slice_bytes(size)
        self._everything = memory.flat(bucket.start, length * size, torch.uint8)
        self._own = self._everything[length * position : length * (position + 1)]

    def transfer(self, communicator: Communicator) -> Rounds:
        """See :class:`~.bucket_pipeline.BucketTransfer`; in the current stream."""
        given = communicator.all_gather(self._everything, self._own)
        yield given
        return given

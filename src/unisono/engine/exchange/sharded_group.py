"""As ``group_exchange.py``, but each worker has the optimizer state of its pieces alone.

::

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

from unisono.engine.exchange.arena import Bytes, Region, Slot, private_bytes
from unisono.engine.exchange.bucket_pipeline import (
    BucketLayout,
    BucketPipeline,
    ParameterBucket,
    Rounds,
    lay_out_buckets,
)
from unisono.engine.exchange.communicator import Communicator
from unisono.engine.exchange.group_exchange import GroupExchange
from unisono.engine.exchange.sharded import ShardedExchange
from unisono.plan.shards import CUT_ELEMENTS, Piece
from unisono.plan.summation import Node


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

"""The sums of a process group's buckets: each worker adds up a slice and gives it to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.device import Device
from unisono.exchange.arena import Region
from unisono.exchange.block import Bytes, private_bytes
from unisono.exchange.bucket_layout import BucketLayout
from unisono.exchange.bucket_parts import ReceivedSlices, by_slices
from unisono.exchange.bucket_pipeline import Rounds
from unisono.exchange.communicator import Communicator
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import SentParts
from unisono.plan.summation import Node


class BucketSum:
    """The sum of one bucket, of which this worker adds up a slice. Final.

    Args:
        layout: the buckets.
        number: which one.
        own: this worker's parts.
        held: the parts of each worker, by position.
        position: of this worker.
        num_shards: S.
        all_sums: where the sums of all parameters go, laid out as a part.
        device: where this worker computes.

    Attributes:
        num_bytes: what it takes of the device's memory.
        present: for each parameter of the bucket, whether any shard had a gradient for it.
    """

    def __init__(
        self,
        layout: BucketLayout,
        number: int,
        own: SentParts,
        held: Sequence[Sequence[Node]],
        position: int,
        num_shards: int,
        all_sums: Bytes,
        device: Device,
    ) -> None:
        bucket = self._bucket = layout.buckets[number]
        self._own, self._mine, self._size = own, held[position], len(held)
        self._received = ReceivedSlices(bucket, held, position, own.flags, device)
        self._sum = OrderedSum(
            self._received,
            [part for parts in held for part in parts],
            num_shards,
            bucket.pieces(position, self._size),
        )
        self.num_bytes = len(self._received.everything)
        self.present: tuple[bool, ...] = ()
        self._length = bucket.slice_bytes(self._size)
        self._sums = all_sums.flat(bucket.start, self._length * self._size, torch.uint8)

    def cross(self, communicator: Communicator) -> Rounds:
        """See :class:`~.bucket_pipeline.BucketCrossing`: slices to each, then sums to all."""
        yield communicator.all_to_all(
            self._received.everything,
            by_slices(self._own, self._bucket, self._mine, self._size),
            from_each=self._received.num_bytes,
            to_each=[self._length * len(self._mine)] * self._size,
        )
        self.present = self._sum.add()
        return communicator.all_gather(self._sums, self._received.part_of_first_shard)


class BucketSums:
    """The sums of all buckets. Final.

    Args:
        layout: the buckets.
        own: this worker's parts.
        held: the parts of each worker, by position.
        position: of this worker.
        num_shards: S.
        device: where this worker computes.

    Attributes:
        buckets: in the order in which they travel.
        whole: the sums of all parameters, as those lie.
        totals: the same as vectors.
        num_bytes: what they take of the device's memory, beside the parts.
    """

    def __init__(
        self,
        layout: BucketLayout,
        own: SentParts,
        held: Sequence[Sequence[Node]],
        position: int,
        num_shards: int,
        device: Device,
    ) -> None:
        memory = private_bytes(layout.num_bytes, device)
        self.buckets = [
            BucketSum(layout, number, own, held, position, num_shards, memory, device)
            for number in range(len(layout.buckets))
        ]
        self.num_bytes = layout.num_bytes + sum(bucket.num_bytes for bucket in self.buckets)
        region = Region(memory, 0, layout.slots)
        self.whole = region.tensors()
        self.totals = [region.piece(n, 0, slot.numel) for n, slot in enumerate(layout.slots)]

    @property
    def present(self) -> tuple[bool, ...]:
        """For each parameter, whether any shard had a gradient for it; once all have crossed."""
        return tuple(there for bucket in reversed(self.buckets) for there in bucket.present)

"""The sums of a process group's buckets: each worker adds up a slice and gives it to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.device import Device
from unisono.exchange.arena import Region
from unisono.exchange.block import Bytes, private_bytes
from unisono.exchange.bucket_layout import BucketLayout, ParameterBucket
from unisono.exchange.bucket_pipeline import Rounds
from unisono.exchange.communicator import Communicator
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import OwnParts
from unisono.plan.slices import Piece
from unisono.plan.summation import Node


class BucketSum:
    """The sum of one bucket, of which this worker adds up a slice. Final.

    Args:
        own: this worker's parts.
        held: the parts of each worker, by position.
        position: of this worker.
        all_sums: where the sums of all parameters go, laid out as a part.

    Attributes:
        num_bytes: what it takes of the device's memory.
        present: for each parameter of the bucket, whether any shard had a gradient for it.
    """

    def __init__(
        self,
        bucket: ParameterBucket,
        own: OwnParts,
        held: Sequence[Sequence[Node]],
        position: int,
        all_sums: Bytes,
        device: Device,
    ) -> None:
        self._bucket, self._own = bucket, own
        self._mine, self._size = held[position], len(held)
        self._received = _ReceivedSlices(bucket, held, position, own.flags, device)
        self._sum = OrderedSum(
            self._received,
            [part for parts in held for part in parts],
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
            _by_slices(self._own, self._bucket, self._mine, self._size),
            from_each=self._received.num_bytes,
            to_each=[self._length * len(self._mine)] * self._size,
        )
        self.present = self._sum.add()
        return communicator.all_gather(self._sums, self._received.part_of_first_shard)


class BucketSums:
    """The sums of all buckets. Final.

    Args:
        own: this worker's parts.
        held: the parts of each worker, by position.
        position: of this worker.

    Attributes:
        buckets: in the order in which they travel.
        whole: the sums of all parameters, as those lie.
        totals: the same as vectors.
        num_bytes: what they take of the device's memory, beside the parts.
    """

    def __init__(
        self,
        layout: BucketLayout,
        own: OwnParts,
        held: Sequence[Sequence[Node]],
        position: int,
        device: Device,
    ) -> None:
        memory = private_bytes(layout.num_bytes, device)
        self.buckets = [
            BucketSum(bucket, own, held, position, memory, device) for bucket in layout.buckets
        ]
        self.num_bytes = layout.num_bytes + sum(bucket.num_bytes for bucket in self.buckets)
        region = Region(memory, 0, layout.slots)
        self.whole = region.tensors()
        self.totals = [region.piece(n, 0, slot.numel) for n, slot in enumerate(layout.slots)]

    @property
    def present(self) -> tuple[bool, ...]:
        """For each parameter, whether any shard had a gradient for it; once all have crossed."""
        return tuple(there for bucket in reversed(self.buckets) for there in bucket.present)


class _ReceivedSlices:
    """One slice of one bucket of everybody's parts. Final.

    Parameters are counted from the bucket's first.

    Args:
        held: the parts of each worker, in the order in which they come.
        position: whose slice.
        flags: per shard, which parameters its part has gradients for.
        device: where they are added up.

    Attributes:
        everything: what comes from all workers, as bytes.
        part_of_first_shard: of these, the slice of the part that begins with shard 0.
        num_bytes: what comes from each worker.
    """

    def __init__(
        self,
        bucket: ParameterBucket,
        held: Sequence[Sequence[Node]],
        position: int,
        flags: Sequence[memoryview],
        device: Device,
    ) -> None:
        length = bucket.slice_bytes(len(held))
        order = [part.lo for parts in held for part in parts]
        memory = private_bytes(length * len(order), device)
        self.everything = memory.flat(0, length * len(order), torch.uint8)
        # As if each part's bucket lay there as a whole: only its slice does.
        self._regions = {
            lo: Region(memory, length * at - position * length, bucket.slots)
            for at, lo in enumerate(order)
        }
        at = length * order.index(0)
        self.part_of_first_shard = self.everything[at : at + length]
        self.num_bytes = [length * len(parts) for parts in held]
        self._flags, self._bucket = flags, bucket

    def flags(self, lo: int) -> bytes:
        return self._bucket.flags(self._flags[lo])

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return self._regions[lo].pieces(pieces)


def _by_slices(
    own: OwnParts, bucket: ParameterBucket, parts: Sequence[Node], num_workers: int
) -> torch.Tensor:
    """Give slice 0 of a bucket of all parts, then slice 1 of all parts, and so on, as bytes."""
    length = bucket.slice_bytes(num_workers)
    num_bytes = num_workers * length
    flat = [own.memory(part.lo).flat(bucket.start, num_bytes, torch.uint8) for part in parts]
    if len(flat) == 1:
        return flat[0]
    starts = range(0, num_bytes, length)
    return torch.cat([part[start : start + length] for start in starts for part in flat])

"""Parts that one worker alone sees, bucket by bucket: its own, and its slices of everybody's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.exchange.arena import Region
from unisono.exchange.bucket_layout import Bucket, BucketLayout
from unisono.plan.slices import Piece
from unisono.plan.summation import Node
from unisono.workers.memory import Memory


class OwnParts:
    """The parts that this worker has computed, where nobody else sees them. Final.

    Args:
        layout: where parameters lie in a part.
        flags: per shard, which parameters its part has gradients for; all see them.

    Attributes:
        gradients: a region for each part, by its first shard.
    """

    def __init__(self, layout: BucketLayout, flags: Sequence[memoryview]) -> None:
        self.flags, self._layout = flags, layout
        self._memories: dict[int, Memory] = {}
        self.gradients = self

    def __getitem__(self, lo: int) -> Region:
        return Region(self._memory(lo), 0, self._layout.slots)

    def by_slices(self, bucket: Bucket, parts: Sequence[Node], num_workers: int) -> torch.Tensor:
        """Give slice 0 of a bucket of all parts, then slice 1 of all parts, and so on, as bytes.

        Args:
            bucket: which one.
            parts: of this worker.
            num_workers: how many slices there are.
        """
        length = bucket.slice_bytes(num_workers)
        flat = [
            self._memory(part.lo).flat(bucket.start, num_workers * length, torch.uint8)
            for part in parts
        ]
        if len(flat) == 1:
            return flat[0]
        starts = range(0, num_workers * length, length)
        return torch.cat([part[start : start + length] for start in starts for part in flat])

    def flip_a_bit(self, part: Node) -> None:
        """Damage a part, for tests."""
        self._memory(part.lo).flat(0, 4, torch.uint8)[2] ^= 1

    def _memory(self, lo: int) -> Memory:
        if lo not in self._memories:
            self._memories[lo] = Memory.private(self._layout.num_bytes)
        return self._memories[lo]


class ReceivedSlices:
    """One slice of one bucket of everybody's parts. Final.

    Parameters are counted from the bucket's first.

    Args:
        bucket: which one.
        held: the parts of each worker, in the order in which they come.
        position: whose slice.
        flags: per shard, which parameters its part has gradients for.

    Attributes:
        everything: what comes from all workers, as bytes.
        part_of_first_shard: of these, the slice of the part that begins with shard 0.
        num_bytes: what comes from each worker.
    """

    def __init__(
        self,
        bucket: Bucket,
        held: Sequence[Sequence[Node]],
        position: int,
        flags: Sequence[memoryview],
    ) -> None:
        length = bucket.slice_bytes(len(held))
        order = [part.lo for parts in held for part in parts]
        memory = Memory.private(length * len(order))
        self.everything = memory.flat(0, memory.num_bytes, torch.uint8)
        # As if each part's bucket lay there as a whole: only its slice does.
        self._regions = {
            lo: Region(memory, length * at - position * length, bucket.slots)
            for at, lo in enumerate(order)
        }
        at = length * order.index(0)
        self.part_of_first_shard = self.everything[at : at + length]
        self.num_bytes = [length * len(parts) for parts in held]
        self._flags, self._indices = flags, bucket.indices

    def flags(self, lo: int) -> bytes:
        """Read which parameters the part in slot `lo` has gradients for; see ``parts.presence``."""
        row, here = self._flags[lo], self._indices
        return bytes(row[:1]) + bytes(row[1 + here.start : 1 + here.stop])

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of the part in slot `lo`, as vectors."""
        region = self._regions[lo]
        return [region.piece(piece.index, piece.start, piece.stop) for piece in pieces]

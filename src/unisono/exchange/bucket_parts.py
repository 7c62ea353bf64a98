"""Parts on their way from worker to worker: what is sent of a bucket, and what comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.device import Device
from unisono.exchange.arena import Region
from unisono.exchange.block import private_bytes
from unisono.exchange.bucket_layout import ParameterBucket
from unisono.exchange.parts import SentParts
from unisono.plan.slices import Piece
from unisono.plan.summation import Node


def by_slices(
    own: SentParts, bucket: ParameterBucket, parts: Sequence[Node], num_workers: int
) -> torch.Tensor:
    """Give slice 0 of a bucket of all parts, then slice 1 of all parts, and so on, as bytes.

    Args:
        own: has the parts of this worker.
        bucket: which one.
        parts: of this worker.
        num_workers: how many slices there are.
    """
    length = bucket.slice_bytes(num_workers)
    num_bytes = num_workers * length
    flat = [own.memory(part.lo).flat(bucket.start, num_bytes, torch.uint8) for part in parts]
    if len(flat) == 1:
        return flat[0]
    starts = range(0, num_bytes, length)
    return torch.cat([part[start : start + length] for start in starts for part in flat])


class ReceivedSlices:
    """One slice of one bucket of everybody's parts. Final.

    Parameters are counted from the bucket's first.

    Args:
        bucket: which one.
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
        self._flags, self._indices = flags, bucket.indices

    def flags(self, lo: int) -> bytes:
        """Read which parameters the part in slot `lo` has gradients for; see ``parts.presence``."""
        row, here = self._flags[lo], self._indices
        return bytes(row[:1]) + bytes(row[1 + here.start : 1 + here.stop])

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of the part in slot `lo`, as vectors."""
        region = self._regions[lo]
        return [region.piece(piece.index, piece.start, piece.stop) for piece in pieces]

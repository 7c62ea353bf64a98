"""Which parameters travel together, and where they lie in a part that is sent in slices.

Parameters are grouped from the last to the first, as a backward pass finishes them, so that a
bucket can travel while the rest is still computed. Within a bucket each worker adds up one slice::

    a part    │ bucket 0: last parameters │ room │ bucket 1 │ room │ … │ first parameters │ room │
    bucket 0  │ slice 0 │ slice 1 │ slice 2 │      each of whole cache lines, the last one padded
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unisono.exchange.arena import Slot
from unisono.exchange.parts import pieces_within
from unisono.plan.slices import Piece
from unisono.workers.memory import ALIGNMENT_BYTES, aligned

FIRST_BYTES, BUCKET_BYTES = 1 << 20, 4 << 20


def bucket_ranges(
    sizes: Sequence[int], first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[range]:
    """Cut parameters, from the last to the first, where a bucket is full.

    Args:
        sizes: the bytes of each parameter.
        first_bytes: what the first bucket has at least, if there is so much.
        bucket_bytes: what each other bucket has at least.
    """
    stop, num_bytes, full_bytes = len(sizes), 0, first_bytes
    for index in reversed(range(len(sizes))):
        num_bytes += sizes[index]
        if num_bytes >= full_bytes or index == 0:
            yield range(index, stop)
            stop, num_bytes, full_bytes = index, 0, bucket_bytes


@dataclass(frozen=True, slots=True)
class ParameterBucket:
    """Parameters that travel together."""

    indices: range  # of the parameters
    start: int  # its first byte in a part
    num_bytes: int  # the bytes of the parameters, without room behind them
    slots: tuple[Slot, ...]  # where each parameter lies, from the bucket's start

    def slice_bytes(self, num_workers: int) -> int:
        """Give the length of each worker's slice."""
        return aligned(max(1, -(-self.num_bytes // num_workers)))

    def pieces(self, position: int, num_workers: int) -> list[Piece]:
        """List what lies in one worker's slice; the first parameter of the bucket is number 0."""
        length = self.slice_bytes(num_workers)
        return list(pieces_within(self.slots, position * length, (position + 1) * length))

    def flags(self, row: memoryview) -> bytes:
        """Cut what a part's flags say of the bucket's parameters; see ``parts.presence``."""
        here = self.indices
        return bytes(row[:1]) + bytes(row[1 + here.start : 1 + here.stop])


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The buckets of all parameters, in the order in which they travel."""

    buckets: tuple[ParameterBucket, ...]  # from the last parameters to the first
    slots: tuple[Slot, ...]  # where each parameter lies in a part, by index
    num_bytes: int  # of a part, with the room behind each bucket
    bucket_of: tuple[int, ...]  # the number of each parameter's bucket, by index


def lay_out_buckets(
    slots: Sequence[Slot],
    world_size: int,
    first_bytes: int = FIRST_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> BucketLayout:
    """Group parameters into buckets.

    Args:
        slots: of all parameters; their offsets do not count.
        world_size: the most workers that a bucket is cut for.
        first_bytes: what the first bucket has at least, if there is so much.
        bucket_bytes: what each other bucket has at least.
    """
    buckets: list[ParameterBucket] = []
    start = 0
    sizes = [slot.end - slot.offset for slot in slots]
    for indices in bucket_ranges(sizes, first_bytes, bucket_bytes):
        own, offset = [], 0
        for index in indices:
            own.append(replace(slots[index], offset=offset))
            offset = own[-1].end
        buckets.append(ParameterBucket(indices, start, offset, tuple(own)))
        start += offset + ALIGNMENT_BYTES * world_size  # the last slice may reach beyond
    placed = {
        index: (number, replace(slot, offset=bucket.start + slot.offset))
        for number, bucket in enumerate(buckets)
        for index, slot in zip(bucket.indices, bucket.slots, strict=True)
    }
    in_order = [placed[index] for index in range(len(slots))]
    numbers, absolute = tuple(n for n, _ in in_order), tuple(slot for _, slot in in_order)
    return BucketLayout(tuple(buckets), absolute, start, numbers)


def lay_out_lane(
    slots: Sequence[Slot], pieces: Sequence[Piece], bucket_bytes: int
) -> list[ParameterBucket]:
    """Group neighbouring pieces into buckets where the slots lie already, the last ones first.

    A bucket may begin and end within a parameter; each begins at a whole cache line.

    Args:
        slots: where each parameter lies in a part.
        pieces: what the buckets hold together, one after the other.
        bucket_bytes: what each bucket has, but for one; whole cache lines.
    """
    spans = [
        (slots[p.index].offset + p.start * size, slots[p.index].offset + p.stop * size)
        for p in pieces
        if p.start < p.stop and (size := slots[p.index].dtype.itemsize)
    ]
    start, stop = (spans[0][0], spans[-1][1]) if spans else (0, 0)
    buckets = []
    for at in range(start, stop, bucket_bytes):
        num_bytes = min(bucket_bytes, stop - at)
        held = [piece.index for piece in pieces_within(slots, at, at + num_bytes)]
        indices = range(held[0], held[-1] + 1) if held else range(0)
        own = tuple(replace(slots[index], offset=slots[index].offset - at) for index in indices)
        buckets.append(ParameterBucket(indices, at, num_bytes, own))
    return buckets[::-1]

"""The layout of a run's shared memory.

One memory per run. The slots of all shards are reserved, but only the slots of parts that a worker
computes are ever written, and unwritten pages do not exist::

    fixed │ parameters │ optimizer state │ whose │ buffers ×2 │ moved ×2 │ rows │ flags │ counts
    left │ marks │ snapshots ×2 │ gradients 0 … S−1 │ sums

The first four, with the present copy of the buffers, are the whole state of a run: a snapshot is
a copy of them (``slots.py``). Every tensor starts at a multiple of 64 bytes, in its own dtype and
strides.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, final

import torch
from torch import nn

from unisono.plan.shards import Piece
from unisono.runtime.checkpoint.slots import MARKS_BYTES, Places
from unisono.runtime.device import Device, bytes_of, is_on_host
from unisono.runtime.workers.memory import (
    ALIGNMENT_BYTES,
    Memory,
    aligned,
    give_pages_back,
    in_pages,
)

ROW_BYTES = 4096
_KEPT_BYTES = 64 << 20
"""Up to this much, a single worker keeps between two loops: new pages would cost milliseconds."""
_BUFFERS = ("buffers", "other buffers")  # regions


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor: `offset` bytes from its region's start."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    numel: int

    @property
    def end(self) -> int:
        """The first byte behind the tensor, rounded up to a whole cache line."""
        return self.offset + aligned(self.numel * self.dtype.itemsize)


def lay_out(named: Mapping[str, torch.Tensor]) -> tuple[Slot, ...]:
    """Place tensors one after the other."""
    slots: list[Slot] = []
    for name, t in named.items():
        offset = slots[-1].end if slots else 0
        slots.append(Slot(name, offset, tuple(t.shape), t.stride(), t.dtype, t.numel()))
    return tuple(slots)


def spans_of(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> list[Span]:
    """Return which bytes of a region are on which device, given the device of each tensor."""
    spans: list[Span] = []
    for slot, tensor in zip(slots, tensors, strict=True):
        if spans and spans[-1].device == tensor.device:
            spans[-1] = spans[-1]._replace(stop=slot.end)
        elif slot.end > slot.offset:
            spans.append(Span(slot.offset, slot.end, tensor.device))
    return spans


def size_of(slots: Sequence[Slot]) -> int:
    """Return the size of a region in bytes."""
    return slots[-1].end if slots else 0


@final
class Region:
    """Tensors laid out in `slots`, which begin at byte `start` of a memory."""

    def __init__(self, memory: Bytes, start: int, slots: Sequence[Slot]) -> None:
        self._memory = memory
        self.start, self.slots = start, slots

    def tensor(self, index: int) -> torch.Tensor:
        """View one tensor as it was laid out."""
        slot = self.slots[index]
        return self._memory.tensor(self.start + slot.offset, slot.shape, slot.dtype, slot.stride)

    def tensors(self) -> list[torch.Tensor]:
        """View all tensors."""
        return [self.tensor(index) for index in range(len(self.slots))]

    def put(self, index: int, value: torch.Tensor) -> None:
        """Write one tensor into its slot, without page faults if both have the same layout."""
        slot, memory = self.slots[index], self._memory
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and is_on_host(value)
        is_plain = is_plain and not (value.is_conj() or value.is_neg())
        lies_so = value.stride() == slot.stride and value.shape == slot.shape
        if isinstance(memory, Memory) and is_plain and lies_so and value.dtype == slot.dtype:
            memory.fill(self.start + slot.offset, bytes_of(value))
        else:
            self.tensor(index).copy_(value)

    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        """View elements `start` … `stop` − 1 of one tensor, in memory order, as a vector."""
        slot = self.slots[index]
        offset = self.start + slot.offset + start * slot.dtype.itemsize
        return self._memory.flat(offset, stop - start, slot.dtype)

    def pieces(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of the tensors, each as a vector."""
        return [self.piece(piece.index, piece.start, piece.stop) for piece in pieces]

    def everything(self) -> torch.Tensor:
        """View all bytes."""
        return self._memory.flat(self.start, size_of(self.slots), torch.uint8)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """What an arena holds; two arenas of the same plan are interchangeable."""

    parameters: tuple[Slot, ...]  # those that the optimizer updates
    fixed: tuple[Slot, ...]  # those that it does not
    states: tuple[Slot, ...]  # the optimizer's tensors, where it keeps them here
    buffers: tuple[Slot, ...]  # the model's
    shards: int  # S
    blob_bytes: int  # what a snapshot may take beside the state, in bytes

    def region_bytes(self) -> dict[str, int]:
        """Return the bytes of each region by name, in whole pages, in the order of memory."""
        parameters, buffers = size_of(self.parameters), size_of(self.buffers)
        state = {
            "fixed": size_of(self.fixed),
            "parameters": parameters,
            "states": size_of(self.states),
            "whose": len(self.parameters),
            "buffers": buffers,
        }
        snapshot = sum(map(in_pages, state.values())) + self.blob_bytes
        sizes = state | {
            "other buffers": buffers,
            "moved": size_of(self.fixed),
            "other moved": size_of(self.fixed),
            "moved flags": len(self.fixed) + 1,
            "other moved flags": len(self.fixed) + 1,
            "rows": self.shards * ROW_BYTES,
            "flags": self.shards * (len(self.parameters) + 1),
            "counts": self.shards * ALIGNMENT_BYTES,
            "left": self.shards,
            "marks": MARKS_BYTES,
            "snapshot": snapshot,
            "other snapshot": snapshot,
            **{f"gradients {shard}": parameters for shard in range(self.shards)},
            "sums": parameters,
        }
        return {name: in_pages(num_bytes) for name, num_bytes in sizes.items()}


@final
class Arena:
    """The regions of one run's shared memory.

    Attributes:
        key: the memory's name among all that the workers share.
        whose: which parameters have optimizer state: a byte for each, 1 for those.
        buffers: the model's buffers twice: those of this step and of the next.
        moved: the fixed parameters that passes move, also twice.
        moved_flags: for each copy, which parameters those are: a byte for each, and a last byte
            that is 1 if the update has changed any.
        gradients: one region per shard; a part lies in the slot of its first shard.
        sums: the sums of the parts, where workers exchange them.
        rows: per shard, ``ROW_BYTES`` bytes for its record of a step.
        flags: per shard, a byte for all parameters of a part and one for each.
        left: per worker, a byte: 1 once its pieces of the state are in `states`.
        counts: per worker, a cache line that counts its ready buckets.
    """

    def __init__(self, memory: Memory, plan: ArenaLayout, key: int) -> None:
        self.memory, self.plan, self.key = memory, plan, key
        sizes = plan.region_bytes()
        self._starts = starts = dict(
            zip(sizes, accumulate(sizes.values(), initial=0), strict=False)
        )
        self.parameters, self.fixed = self.region("parameters"), self.region("fixed")
        self.states = self.region("states")
        self.whose = self.whose_in(0)
        self.left = memory.view(starts["left"], plan.shards)
        self.buffers = self._regions(plan.buffers, _BUFFERS)
        self.moved = self._regions(plan.fixed, ("moved", "other moved"))
        self.moved_flags = tuple(
            memory.view(starts[name], len(plan.fixed) + 1)
            for name in ("moved flags", "other moved flags")
        )
        parts = [f"gradients {shard}" for shard in range(plan.shards)]
        *self.gradients, self.sums = self._regions(plan.parameters, (*parts, "sums"))
        self.rows = self._per_shard("rows", ROW_BYTES)
        self.flags = self._per_shard("flags", len(plan.parameters) + 1)
        self.counts = self._per_shard("counts", ALIGNMENT_BYTES)
        self.places = Places(
            key=key,
            num_bytes=sum(sizes.values()),
            marks_at=starts["marks"],
            slots_at=(starts["snapshot"], starts["other snapshot"]),
            slot_bytes=sizes["snapshot"],
            blob_at=sizes["snapshot"] - in_pages(plan.blob_bytes),
        )

    @staticmethod
    def num_bytes(plan: ArenaLayout) -> int:
        """Return the bytes of memory that a plan needs."""
        return sum(plan.region_bytes().values())

    def state_spans(self, copy_of_buffers: int) -> list[tuple[int, int]]:
        """Return the spans (start, stop) of the state, in the order in which snapshots keep it."""
        end, now = self._starts["buffers"], self._starts[_BUFFERS[copy_of_buffers]]
        return [(0, end), (now, now + self._starts[_BUFFERS[1]] - end)]

    @property
    def is_kept_between_loops(self) -> bool:
        """Whether a single worker need not release its memory of state and gradients."""
        start, stop = self.state_spans(0)[0]
        return stop - start + 2 * size_of(self.plan.parameters) <= _KEPT_BYTES

    def forget_gradients(self) -> None:
        """Release the memory of gradients and their sums once all workers have read them."""
        give_pages_back(self.memory.mapping, self._starts["gradients 0"], self.places.num_bytes)

    def region(self, name: str, snapshot_at: int = 0) -> Region:
        """View a region of the plan, or the copy of it in the snapshot that begins at a byte."""
        return Region(self.memory, snapshot_at + self._starts[name], getattr(self.plan, name))

    def whose_in(self, snapshot_at: int) -> memoryview:
        """View `whose`, or the copy of it in the snapshot that begins at a byte."""
        return self.memory.view(snapshot_at + self._starts["whose"], len(self.plan.parameters))

    def _regions(self, slots: Sequence[Slot], names: Sequence[str]) -> tuple[Region, ...]:
        return tuple(Region(self.memory, self._starts[name], slots) for name in names)

    def _per_shard(self, region: str, num_bytes: int) -> list[memoryview]:
        start = self._starts[region]
        return [
            self.memory.view(start + shard * num_bytes, num_bytes)
            for shard in range(self.plan.shards)
        ]


class Span(NamedTuple):
    """Bytes from `start` to `stop` that are on one device."""

    start: int
    stop: int
    device: torch.device


@final
class Block:
    """Bytes on accelerators; each tensor lies within one span.

    Args:
        spans: one after the other, each on its device.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._starts = [span.start for span in spans]
        self._blocks = [
            torch.empty(span.stop - span.start, dtype=torch.uint8, device=span.device)
            for span in spans
        ]

    def release(self) -> None:
        """Release the memory even if views of it exist, which nobody reads any more."""
        for block in self._blocks:
            block.untyped_storage().resize_(0)

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None
    ) -> torch.Tensor:
        """View bytes from `offset` on as a dense tensor (contiguous without `stride`)."""
        flat = self.flat(offset, math.prod(shape), dtype)
        return flat.view(*shape) if stride is None else flat.as_strided(shape, stride)

    def flat(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """View `numel` elements from byte `offset` on as a vector."""
        at = max(bisect_right(self._starts, offset) - 1, 0)
        first = offset - self._starts[at]
        there = self._blocks[at][first : first + numel * dtype.itemsize]
        return there.view(dtype) if numel else torch.empty(0, dtype=dtype, device=there.device)


Bytes = Memory | Block
"""Memory that tensors can be laid out in."""


def within(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the parts of spans that lie between two bytes."""
    for span in spans:
        first, last = max(span.start, start), min(span.stop, stop)
        if first < last:
            yield Span(first, last, span.device)


def private_bytes(num_bytes: int, device: Device, spans: Sequence[Span] = ()) -> Bytes:
    """Allocate memory of a device for this process alone.

    Args:
        spans: on several devices, where which bytes are.
    """
    if device.is_host:
        return Memory.private(num_bytes)
    return Block(spans or [Span(0, num_bytes, device.torch)])

"""Where everything of a run lies in shared memory.

One memory per run. The slots of all shards are reserved, but only the slots of the parts that
somebody computes are ever written, and unwritten pages do not exist::

    parameters │ fixed │ optimizer state │ whose │ buffers ×2 │ rows │ flags │ marks │ snapshots ×2
    gradients 0 … S−1

The first four, with the present copy of the buffers, are the whole state of a run: a snapshot is
a copy of them (`unisono.checkpoint.places`). Every tensor starts at a multiple of 64 bytes, in its
own dtype and strides.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from unisono.checkpoint.places import MARKS_BYTES, Places
from unisono.workers.memory import Memory, aligned

ROW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor: `offset` bytes from its region's start."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    numel: int

    @property
    def end(self) -> int:
        """The first byte after it, in whole cache lines."""
        return self.offset + aligned(self.numel * self.dtype.itemsize)


def lay_out(tensors: Iterable[torch.Tensor]) -> list[Slot]:
    """Place tensors one after the other."""
    slots: list[Slot] = []
    for t in tensors:
        offset = slots[-1].end if slots else 0
        slots.append(Slot(offset, tuple(t.shape), t.stride(), t.dtype, t.numel()))
    return slots


def size_of(slots: Sequence[Slot]) -> int:
    """Count the bytes of a region."""
    return slots[-1].end if slots else 0


class Region:
    """Tensors laid out from byte `start` of a memory. Final."""

    def __init__(self, memory: Memory, start: int, slots: Sequence[Slot]) -> None:
        self._memory = memory
        self._start = start
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def tensor(self, index: int) -> torch.Tensor:
        """View one tensor as it was laid out."""
        slot = self._slots[index]
        return self._memory.tensor(self._start + slot.offset, slot.shape, slot.dtype, slot.stride)

    def tensors(self) -> list[torch.Tensor]:
        """View all tensors."""
        return [self.tensor(index) for index in range(len(self._slots))]

    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        """View elements `start` … `stop` − 1 of one tensor, in memory order, as a vector."""
        slot = self._slots[index]
        offset = self._start + slot.offset + start * slot.dtype.itemsize
        return self._memory.flat(offset, stop - start, slot.dtype)

    def everything(self) -> torch.Tensor:
        """View all bytes."""
        return self._memory.flat(self._start, size_of(self._slots), torch.uint8)


@dataclass(frozen=True, slots=True)
class Plan:
    """What an arena holds; two arenas of the same plan are interchangeable.

    Attributes:
        parameters: those that the optimizer updates.
        fixed: those that it does not.
        states: the optimizer's tensors, where it keeps them here.
        buffers: the model's.
        shards: S.
        blob_bytes: what a snapshot may take beside the state, in bytes.
    """

    parameters: tuple[Slot, ...]
    fixed: tuple[Slot, ...]
    states: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    shards: int
    blob_bytes: int

    def region_bytes(self) -> tuple[int, ...]:
        """Count the bytes of each region, in whole pages, in the order they lie."""
        buffers, gradients = size_of(self.buffers), size_of(self.parameters)
        state = (size_of(self.parameters), size_of(self.fixed), size_of(self.states))
        snapshot = sum(map(_in_pages, (*state, len(self.parameters), buffers))) + self.blob_bytes
        sizes = (
            *state,
            len(self.parameters),
            buffers,
            buffers,
            self.shards * ROW_BYTES,
            self.shards * (len(self.parameters) + 1),
            MARKS_BYTES,
            snapshot,
            snapshot,
            *(gradients,) * self.shards,
        )
        return tuple(map(_in_pages, sizes))


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """The regions of one run's shared memory. Final.

    Attributes:
        memory: all of it.
        plan: what it holds.
        key: the memory's name among all that the workers share.
        places: where snapshots lie.
        parameters: the parameters that the optimizer updates.
        fixed: those that it does not.
        states: the optimizer's tensors, arrays and scalars.
        buffers: the model's buffers twice: those of this step and of the next.
        gradients: one region per shard; a part lies in the slot of its first shard.
    """

    def __init__(self, memory: Memory, plan: Plan, key: int) -> None:
        self.memory, self.plan, self.key = memory, plan, key
        starts = list(accumulate(plan.region_bytes(), initial=0))
        self.parameters = Region(memory, starts[0], plan.parameters)
        self.fixed = Region(memory, starts[1], plan.fixed)
        self.states = Region(memory, starts[2], plan.states)
        self.buffers = tuple(Region(memory, start, plan.buffers) for start in starts[4:6])
        self.gradients = tuple(Region(memory, start, plan.parameters) for start in starts[11:-1])
        self._starts = starts
        self._whose_at, self._rows_at, self._flags_at = starts[3], starts[6], starts[7]
        self.places = Places(
            key=key,
            num_bytes=starts[-1],
            marks_at=starts[8],
            slots_at=(starts[9], starts[10]),
            slot_bytes=starts[10] - starts[9],
            blob_at=starts[10] - starts[9] - _in_pages(plan.blob_bytes),
        )

    @staticmethod
    def num_bytes(plan: Plan) -> int:
        """Count the bytes of memory that a plan needs."""
        return sum(plan.region_bytes())

    def state_spans(self, copy_of_buffers: int) -> list[tuple[int, int]]:
        """Say where the state lies: spans (start, stop), in the order that snapshots keep.

        Args:
            copy_of_buffers: which of the two copies is the present one.
        """
        at = 4 + copy_of_buffers
        return [(0, self._starts[4]), (self._starts[at], self._starts[at + 1])]

    def offset_in_snapshot(self, region: str, slot: Slot) -> int:
        """Say where in a snapshot a tensor lies; `region` is the attribute that has it."""
        start = {"parameters": 0, "fixed": 1, "states": 2, "buffers": 4}[region]
        return self._starts[start] + slot.offset

    def write_row(self, shard: int, row: bytes) -> None:
        """Publish what one shard has to say about this step, at most ``ROW_BYTES`` bytes."""
        self.memory.write(self._rows_at + shard * ROW_BYTES, row)

    def read_row(self, shard: int, num_bytes: int, start: int = 0) -> bytes:
        """Read bytes of a shard's row."""
        return self.memory.read(self._rows_at + shard * ROW_BYTES + start, num_bytes)

    def write_flags(self, row: int, flags: bytes) -> None:
        """Write one byte for all parameters of a part and one for each."""
        self.memory.write(self._flags_at + row * self._flag_bytes, flags)

    def read_flags(self, row: int) -> bytes:
        """Read what :meth:`write_flags` wrote."""
        return self.memory.read(self._flags_at + row * self._flag_bytes, self._flag_bytes)

    @property
    def whose(self) -> bytes:
        """Which parameters have optimizer state: a byte for each, 1 for those."""
        return self.memory.read(self._whose_at, len(self.plan.parameters))

    @whose.setter
    def whose(self, flags: bytes) -> None:
        self.memory.write(self._whose_at, flags)

    def note_state(self, index: int) -> None:
        """Note that one parameter has optimizer state."""
        self.memory.write(self._whose_at + index, b"\1")

    @property
    def _flag_bytes(self) -> int:
        return len(self.plan.parameters) + 1

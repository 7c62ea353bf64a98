"""Copies of a run's whole state in its own shared memory, two in turn; see ``checkpoint.places``.

A snapshot is taken between two steps, each worker copying its share of the bytes; it is whole once
all have come to the next meeting. What is not in the arena (position, options of the optimizer,
schedules, what the user keeps) is written beside it by the leader, as plain JSON and bytes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.checkpoint.safetensors_stream import CODES
from unisono.checkpoint.slots import (
    offsets_of,
    read_extra,
    read_facts,
    read_tensors,
    write_blob,
)
from unisono.device import bytes_of
from unisono.exchange.arena import Arena, Slot

_SHARE_ALIGNMENT = 4096


class Snapshots:
    """The two slots of one arena, as one worker sees them. Final.

    Attributes:
        places: where they lie.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.places = arena.places
        self._memory = arena.memory

    @property
    def mapping(self) -> mmap.mmap:
        """The bytes of the memory that they lie in."""
        return self._memory.mapping

    @property
    def newest(self) -> int | None:
        """The slot of the newest whole snapshot."""
        return self.places.newest(self._memory.read)

    @property
    def next_is_busy(self) -> bool:
        """Whether the slot that comes next is still being written to the disk."""
        return self.places.is_busy(self._next(), self._memory.read)

    @property
    def is_writing(self) -> bool:
        """Whether any slot is still being written to the disk."""
        return any(self.places.is_busy(slot, self._memory.read) for slot in (0, 1))

    def copy(self, copy_of_buffers: int, position: int, size: int) -> int:
        """Copy one worker's share of the state into the slot that comes next.

        Args:
            copy_of_buffers: which of the two copies is the present one.
            position: of this worker among those that copy.
            size: how many copy.

        Returns:
            The slot; it is whole once everybody has come back from here.
        """
        slot = self.begin()
        self._copy(slot, copy_of_buffers, position, size, into_slot=True)
        return slot

    def begin(self) -> int:
        """Begin a snapshot in the slot that comes next, which holds none from here on."""
        slot = self._next()
        self._memory.write(self.places.mark_at(slot), bytes(8))
        return slot

    def parameters(self, slot: int) -> list[torch.Tensor]:
        """View where a slot keeps parameters: those that are updated, then the others."""
        arena, at = self._arena, self.places.slots_at[slot]
        regions = ("parameters", arena.plan.parameters), ("fixed", arena.plan.fixed)
        return [
            self._memory.tensor(
                at + arena.offset_in_snapshot(region, place), place.shape, place.dtype, place.stride
            )
            for region, places in regions
            for place in places
        ]

    def copy_buffers(self, slot: int, copy_of_buffers: int, *, into_slot: bool) -> None:
        """Copy one of the two copies of the buffers into a slot or back."""
        spans = self._arena.state_spans(copy_of_buffers)
        start, stop = spans[1]
        at = self.places.slots_at[slot] + spans[0][1] - spans[0][0]
        live = self._memory.flat(start, stop - start, torch.uint8)
        kept = self._memory.flat(at, stop - start, torch.uint8)
        kept.copy_(live) if into_slot else live.copy_(kept)

    def describe(
        self, slot: int, facts: Mapping[str, Any], tensors: bytes, extra: Sequence[torch.Tensor]
    ) -> None:
        """Write what is not in the arena; one worker does.

        Args:
            slot: what :meth:`copy` gave.
            facts: plain JSON.
            tensors: the description of all tensors, as ``checkpoint.slots`` has it.
            extra: tensors that are not in the arena, at the offsets that `tensors` says.

        Raises:
            ValueError: it does not fit.
        """
        data = [as_bytes(tensor) for tensor in extra]
        write_blob(self._slot(slot), self.places.blob_at, json.dumps(facts).encode(), tensors, data)

    def complete(self, slot: int) -> None:
        """Note that a slot is whole; everybody who knows it may say so."""
        newest = max(self.places.marks(self._memory.read))
        mine = self.places.marks(self._memory.read)[slot]
        if not mine:
            self._memory.write(self.places.mark_at(slot), (newest + 1).to_bytes(8, "little"))

    def put_back(self, slot: int, copy_of_buffers: int, position: int, size: int) -> None:
        """Copy one worker's share of a snapshot back into the arena."""
        self._copy(slot, copy_of_buffers, position, size, into_slot=False)

    def facts(self, slot: int) -> dict[str, Any]:
        """Read what :meth:`describe` wrote."""
        return read_facts(self._slot(slot), self.places.blob_at)

    def extra(self, slot: int) -> dict[str, torch.Tensor]:
        """Read the tensors that are not in the arena, by name."""
        view = self._slot(slot)
        found = {}
        for described in read_tensors(view, self.places.blob_at)["optimizer.safetensors"]:
            if described["in"] == "extra":
                data = bytearray(read_extra(view, self.places.blob_at, described))
                found[described["name"]] = from_bytes(data, described)
        return found

    def _next(self) -> int:
        newest = self.newest
        return 0 if newest is None else 1 - newest

    def _slot(self, slot: int) -> memoryview:
        return self._memory.view(self.places.slots_at[slot], self.places.slot_bytes)

    def _copy(
        self, slot: int, copy_of_buffers: int, position: int, size: int, *, into_slot: bool
    ) -> None:
        at = self.places.slots_at[slot]
        for start, stop in self._arena.state_spans(copy_of_buffers):
            first, last = _share(stop - start, position, size)
            if last > first:
                count = last - first
                live = self._memory.flat(start + first, count, torch.uint8)
                kept = self._memory.flat(at + first, count, torch.uint8)
                kept.copy_(live) if into_slot else live.copy_(kept)
            at += stop - start


def describe_tensor(name: str, slot: Slot, offset: int) -> dict[str, Any]:
    """Describe a tensor of the arena, for a checkpoint's file."""
    return {
        "name": name,
        "dtype": CODES.get(str(slot.dtype), str(slot.dtype)),
        "shape": list(slot.shape),
        "stride": list(slot.stride),
        "offset": offset,
        "in": "state",
    }


def describe_extras(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Describe tensors that are kept beside the state, in this order."""
    offsets = offsets_of([tensor.nbytes for tensor in tensors.values()])
    return [
        {
            "name": name,
            "dtype": CODES.get(str(tensor.dtype), str(tensor.dtype)),
            "shape": list(tensor.shape),
            "stride": list(layout_of(tensor)),
            "offset": offset,
            "in": "extra",
        }
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
    ]


def strides_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """List the strides of those tensors whose elements do not lie row by row."""
    layouts = {name: layout_of(tensor) for name, tensor in tensors.items()}
    return {
        name: list(layout)
        for name, layout in layouts.items()
        if layout != torch.empty(tensors[name].shape, device="meta").stride()
    }


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Give the strides that a copy of a tensor has: its own, if it fills its memory."""
    return torch.empty_like(tensor, device="meta").stride()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """View a tensor's elements as bytes, in the order of its :func:`layout_of`."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    if dense.stride() != layout_of(dense):
        dense = dense.clone()
    return bytes_of(dense)


def from_bytes(data: bytearray, described: Mapping[str, Any]) -> torch.Tensor:
    """Make a tensor of its bytes and its description."""
    code, shape, stride = described["dtype"], described["shape"], described["stride"]
    dtype = _DTYPES.get(code) or getattr(torch, code.removeprefix("torch."))
    if not data:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)


_DTYPES = {code: getattr(torch, name.removeprefix("torch.")) for name, code in CODES.items()}


def _share(num_bytes: int, position: int, size: int) -> tuple[int, int]:
    """Give one worker's part of so many bytes, in whole pages."""
    pages = -(-num_bytes // _SHARE_ALIGNMENT)
    bounds = [pages * part // size * _SHARE_ALIGNMENT for part in (position, position + 1)]
    return min(bounds[0], num_bytes), min(bounds[1], num_bytes)

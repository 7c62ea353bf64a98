"""Copies of a run's whole state in its own shared memory, two in turn; see ``checkpoint.places``.

A snapshot is taken between two steps: each worker copies its share of the bytes, and the snapshot
is whole at the next barrier. The leader writes what is not in the arena (position, options of the
optimizer, schedules, the user's values) beside it, as plain JSON and bytes.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from unisono.engine.exchange.arena import Arena, ArenaLayout, Region, Slot, lay_out, size_of
from unisono.engine.exchange.shared_optimizer_state import StateKeys
from unisono.runtime.checkpoint.folder import MODEL_FILE, OPTIMIZER_FILE
from unisono.runtime.checkpoint.slots import (
    offsets_of,
    read_extras,
    read_facts,
    used_bytes,
    write_blob,
)
from unisono.runtime.device import HOST, bytes_of, on_host
from unisono.runtime.dtypes import code_of, dtype_of
from unisono.runtime.workers.memory import give_pages_back
from unisono.runtime.workers.team import Team

_SHARE_ALIGNMENT = 4096


@final
class Snapshots:
    """The two slots of one arena, as one worker sees them."""

    def __init__(self, arena: Arena, keys: StateKeys) -> None:
        self._arena = arena
        self.places = arena.places
        self._memory = arena.memory
        model = (_described_in(arena, name) for name in ("parameters", "fixed", "buffers"))
        self._model = [one for region in model for one in region]
        states = _described_in(arena, "states")
        self._states = [[states[key.at] for key in of_one.values()] for of_one in keys]
        self._known: tuple[bytes, str] = (b"", "")
        self._files = b""

    @property
    def mapping(self) -> mmap.mmap:
        """The mapping of the memory that contains the slots."""
        return self._memory.mapping

    @property
    def newest(self) -> int | None:
        """The slot of the newest whole snapshot."""
        return self.places.newest(self._memory.read)

    @property
    def next_is_busy(self) -> bool:
        """Whether the next slot is still being written to disk."""
        return self.places.is_busy(self._next(), self._memory.read)

    @property
    def is_writing(self) -> bool:
        """Whether any slot is still being written to disk."""
        return any(self.places.is_busy(slot, self._memory.read) for slot in (0, 1))

    def begin(self) -> int:
        """Begin a snapshot in the next slot, which is not whole from now on."""
        slot = self._next()
        self._memory.write(self.places.mark_at(slot), bytes(8))
        return slot

    def copy(
        self,
        slot: int,
        copy_of_buffers: int,
        position: int,
        size: int,
        *,
        into_slot: bool,
        buffers_alone: bool = False,
    ) -> None:
        """Copy one worker's share of the state into a slot, or back into the arena.

        Args:
            position, size: this worker's position among those that copy, and their number.
        """
        state, buffers = self._arena.state_spans(copy_of_buffers)
        at = self.places.slots_at[slot]
        spans = [(*state, at), (*buffers, at + state[1])]
        for start, stop, kept_at in spans[buffers_alone:]:
            first, last = _share(stop - start, position, size)
            live = self._memory.flat(start + first, last - first, torch.uint8)
            kept = self._memory.flat(kept_at + first, last - first, torch.uint8)
            kept.copy_(live) if into_slot else live.copy_(kept)

    def parameters(self, slot: int) -> list[torch.Tensor]:
        """View the parameters in a slot: those that are updated, then the others."""
        at = self.places.slots_at[slot]
        regions = (self._arena.region(name, at) for name in ("parameters", "fixed"))
        return [tensor for region in regions for tensor in region.tensors()]

    def states(self, slot: int) -> tuple[Region, memoryview]:
        """View the optimizer's state in a slot, and which parameters have some."""
        at = self.places.slots_at[slot]
        return self._arena.region("states", at), self._arena.whose_in(at)

    def describe(
        self, slot: int, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Write the facts and tensors that are not in the arena; only the leader calls this.

        Args:
            facts: plain JSON.
            tensors: tensors outside of the arena.
        """
        facts = {**facts, "strides": strides_of(tensors)}
        files, data = self._describe_files(tensors), map(as_bytes, tensors.values())
        text = json.dumps(facts).encode()
        write_blob(self._slot(slot), self.places.blob_at, text, files, list(data))

    def written(self, slot: int) -> int:
        """Return how many bytes :meth:`copy` and :meth:`describe` have written into a slot."""
        return used_bytes(self._slot(slot), self.places.blob_at)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """View the first bytes of a slot."""
        return self._slot(slot)[:num_bytes]

    def complete(self, slot: int) -> None:
        """Mark a slot as whole; any worker that knows it is may call this."""
        marks = self.places.marks(self._memory.read)
        if not marks[slot]:
            self._memory.write(self.places.mark_at(slot), (max(marks) + 1).to_bytes(8, "little"))

    def keep_only(self, slot: int) -> None:
        """Release the memory of the other slot, unless it is being written to disk."""
        other = 1 - slot
        if not self.places.is_busy(other, self._memory.read):
            self._memory.write(self.places.mark_at(other), bytes(8))
            start = self.places.slots_at[other]
            give_pages_back(self._memory.mapping, start, start + self.places.slot_bytes)

    @property
    def number(self) -> int:
        """The number of whole snapshots so far, as far as this host knows."""
        return max(self.places.marks(self._memory.read))

    def complete_up_to(self, number: int) -> None:
        """Mark the snapshot under way as whole, if another host knows that it is."""
        if number > self.number:
            self.complete(self._next())

    def facts(self, slot: int) -> dict[str, Any]:
        """Read what :meth:`describe` wrote."""
        return read_facts(self._slot(slot), self.places.blob_at)

    def extra(self, slot: int) -> dict[str, torch.Tensor]:
        """Read the tensors that are not in the arena, by name."""
        extras = read_extras(self._slot(slot), self.places.blob_at)
        return {said["name"]: from_bytes(bytearray(data), said) for said, data in extras}

    def _describe_files(self, extras: Mapping[str, torch.Tensor]) -> bytes:
        """Return JSON that describes the tensors of both files for ``checkpoint.slots``."""
        whose, beside = bytes(self._arena.whose), describe_extras(extras)
        key = (whose, json.dumps(beside))
        if key != self._known or not self._files:
            states = [
                one for has, some in zip(whose, self._states, strict=True) if has for one in some
            ]
            files = {MODEL_FILE: self._model, OPTIMIZER_FILE: states + beside}
            self._known, self._files = key, json.dumps(files).encode()
        return self._files

    def _next(self) -> int:
        newest = self.newest
        return 0 if newest is None else 1 - newest

    def _slot(self, slot: int) -> memoryview:
        return self._memory.view(self.places.slots_at[slot], self.places.slot_bytes)


def _described_in(arena: Arena, name: str) -> list[dict[str, Any]]:
    region = arena.region(name)
    return [
        _described(one.name, one.dtype, one.shape, one.stride, region.start + one.offset, "state")
        for one in region.slots
    ]


def _described(
    name: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    part: str,
) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": code_of(dtype),
        "shape": list(shape),
        "stride": list(stride),
        "offset": offset,
        "in": part,
    }


def describe_extras(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return descriptions of the tensors that are saved beside the state, in this order."""
    offsets = offsets_of([tensor.nbytes for tensor in tensors.values()])
    return [
        _described(name, tensor.dtype, tensor.shape, layout_of(tensor), offset, "extra")
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
    ]


def strides_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return the strides of tensors whose elements do not lie row by row."""
    layouts = {name: layout_of(tensor) for name, tensor in tensors.items()}
    return {
        name: list(layout)
        for name, layout in layouts.items()
        if layout != torch.empty(tensors[name].shape, device="meta").stride()
    }


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of a tensor: its own, if it fills its memory."""
    return torch.empty_like(tensor, device="meta").stride()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """View a tensor's elements as bytes, in the order of its :func:`layout_of`."""
    dense = on_host(tensor).resolve_conj().resolve_neg()
    if dense.stride() != layout_of(dense):
        dense = dense.clone()
    return bytes_of(dense)


def hash_of(tensor: torch.Tensor) -> int:
    """Hash a tensor's elements, for workers to compare."""
    return zlib.crc32(as_bytes(tensor.detach()))


def from_bytes(data: bytearray, described: Mapping[str, Any]) -> torch.Tensor:
    """Make a tensor from its bytes and its description."""
    dtype, shape, stride = dtype_of(described["dtype"]), described["shape"], described["stride"]
    if not data:
        return torch.empty_strided(shape, stride, dtype=dtype, device=HOST)
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)


def _share(num_bytes: int, position: int, size: int) -> tuple[int, int]:
    pages = -(-num_bytes // _SHARE_ALIGNMENT)
    bounds = [pages * part // size * _SHARE_ALIGNMENT for part in (position, position + 1)]
    return min(bounds[0], num_bytes), min(bounds[1], num_bytes)


# Beside the state, a snapshot has room for this much and some times the parameters: optimizers that
# are not element-wise keep their state there, and programs averages of weights. Pages that are not
# written do not exist.
_BLOB_BYTES = 1 << 26
_BLOB_TIMES_PARAMETERS = 8


def plan_of(
    parameters: Mapping[str, torch.Tensor],
    fixed: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    buffers: tuple[Slot, ...],
    shards: int,
) -> ArenaLayout:
    """Plan an arena for these tensors; `states` are examples of the optimizer's."""
    slots, fixed_slots = lay_out(parameters), lay_out(fixed)
    room = _BLOB_BYTES + _BLOB_TIMES_PARAMETERS * (size_of(slots) + size_of(fixed_slots))
    return ArenaLayout(slots, fixed_slots, lay_out(states), buffers, shards, room)


@final
class RunMemory:
    """The memory that the workers of a host share in one run, with any carriage.

    Args:
        key: names the memory; None: reuse `previous` if all workers have it and it fits.
        new_key: names new memory.
    """

    def __init__(
        self,
        plan: ArenaLayout,
        keys: StateKeys,
        team: Team,
        *,
        key: int | None,
        previous: RunMemory | None,
        new_key: int,
    ) -> None:
        arena: Arena | None = None if previous is None else previous.arena
        if key is not None or not _have_all(arena, team):
            arena = None
        if arena is None or arena.plan != plan:
            key = new_key if key is None else key
            arena = Arena(team.memory(key, Arena.num_bytes(plan)), plan, key)
        self.arena: Arena = arena
        self.snapshots = Snapshots(arena, keys)

    def newest(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Read the facts and tensors saved beside the newest snapshot."""
        slot = self.newest_slot
        return self.snapshots.facts(slot), self.snapshots.extra(slot)

    @property
    def newest_slot(self) -> int:
        """The slot of the newest snapshot."""
        slot = self.snapshots.newest
        assert slot is not None, "a loop begins with a snapshot"
        return slot

    @property
    def copy_of_buffers(self) -> int:
        """Which copy of the buffers was current in the newest snapshot."""
        return int(self.snapshots.facts(self.newest_slot)["copy of buffers"])


def _have_all(arena: Arena | None, team: Team) -> bool:
    """Return whether every worker has this arena: a replacement may have missed its loop."""
    mine = b"none" if arena is None else str(arena.key).encode()
    return len(set(team.gather(mine, "choice of memory").values())) == 1

"""Buffers of the model, such as BatchNorm's statistics: every shard starts from the same values.

As DDP keeps rank 0's, Unisono keeps the buffers that the first non-empty shard leaves. The arena
holds two copies: a step reads one and writes the other, then they are swapped. A buffer stays the
same object, as a parameter does; only its memory is exchanged. Parameters that passes move are
treated the same (``moving.py``). A model with neither carries no state from shard to shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch

from unisono.engine.exchange.arena import (
    Arena,
    Region,
    Span,
    lay_out,
    private_bytes,
    size_of,
    spans_of,
)
from unisono.engine.exchange.moving import VERSION, Moving, replace_data
from unisono.engine.exchange.private_view import check_changed_alike
from unisono.engine.exchange.snapshots import hash_of
from unisono.engine.state.contents import buffer_at, lazy_owners, owners_of_buffers
from unisono.runtime.device import Copies, Device, by_device, on_host
from unisono.runtime.workers.team import Team


@final
class Buffers:
    """The model's buffers, copied as one block of bytes.

    On the CPU the buffers lie in the block. On an accelerator they have their own memory, and are
    copied to and from blocks on the device.

    Attributes:
        slots: where each buffer lies in a block; the arena reserves two blocks.
        now: which of the arena's two copies is current.
        is_kept_here: whether this worker has published the buffers for the next step.
        moving: parameters that are treated the same; None if every parameter has an optimizer.
    """

    def __init__(self, model: torch.nn.Module, device: Device, copies: Copies) -> None:
        self.now, self.is_kept_here = 0, False
        self.moving: Moving | None = None
        named = owners_of_buffers(model)
        self._names, self._owners = list(named), list(named.values())
        self._lazy = lazy_owners(model)
        self._tensors = tensors = [buffer_at(owners[0]) for owners in self._owners]
        self._are_any = bool(tensors or self._lazy)
        self.slots = slots = lay_out(dict(zip(named, tensors, strict=True)))
        self._device, self._is_host = device, device.is_host
        self._copies, size = copies, size_of(slots)
        self._shared: list[torch.Tensor] = []  # blocks on the host, where all see them
        self._lists: list[Any] = []  # one list per dtype and device, copied together
        self._versions: list[int] = []  # when the values were set; empty: some are new
        self._places: list[torch.Tensor] = []  # their memory while a loop runs
        self._addresses: list[int] = []
        spans = spans_of(slots, tensors) if device.is_divided else [Span(0, size, device.torch)]
        self._block, self._start = (private_bytes(size, device, spans) for _ in range(2))
        self._spans = [(start, stop) for start, stop, _ in spans]
        if self._is_host:
            self._bytes = self._block.flat(0, size, torch.uint8)
            self._start_bytes = self._start.flat(0, size, torch.uint8)

    def bind(self, arena: Arena) -> None:
        """Move the buffers into the block, with their values."""
        self.now = 0
        if not self.slots:
            return
        self._regions = arena.buffers
        self._shared = [region.everything() for region in arena.buffers]
        views = Region(self._block, 0, self.slots).tensors()
        if self._is_host:
            for tensor, view in zip(self._tensors, views, strict=True):
                view.copy_(tensor)
                tensor.data = view
        self._places = [tensor.data for tensor in self._tensors]
        self._addresses = [*map(torch.Tensor.data_ptr, self._places)]
        if self._is_host:
            return
        started = Region(self._start, 0, self.slots).tensors()
        self._lists = [
            lists
            for kind in {tensor.dtype for tensor in self._tensors}
            for lists in by_device(
                *(
                    [one for one in tensors if one.dtype == kind]
                    for tensors in (self._tensors, views, started)
                )
            )
        ]

    def unbind(self) -> None:
        """Move the model's buffers out of the block, into separate memory."""
        self._shared, self._addresses = [], []
        if self._is_host:
            for tensor in self._tensors:
                tensor.data = tensor.data.clone()

    def give(self) -> None:
        """Publish this worker's values to all workers."""
        self._copy_out(self.now)
        self._copies.wait()

    def check_changes(self, team: Team) -> None:
        """Raise MismatchError if workers changed buffers differently. Collective if any changed."""
        if team.size > 1 and (changed := self._changed(self.now)):
            value = zlib.crc32(repr(changed).encode())
            check_changed_alike(team, next(iter(changed)), value, lambda: changed)

    def publish(self, team: Team, *, alone: bool) -> None:
        """Publish changes that the program made since the step. Collective unless `alone`."""
        if not self.slots:
            return
        if not alone:
            self.check_changes(team)
            self._copies.wait()
            team.meet("buffers are taken")
        while True:
            if alone or team.leads_host:
                self.give()
            if alone or team.meet("buffers are given"):  # else the giver may be lost
                return

    def load(self, now: int) -> None:
        """Load one of the arena's copies, and make it the current one."""
        for tensor, owners in zip(self._tensors, self._owners, strict=True):
            for module, key in owners:
                module._buffers[key] = tensor  # whatever a forward pass put there
        for tensor, place in zip(self._tensors, self._places, strict=True):
            tensor.data = place
        self.now = now
        self._copy_in(now, are_here=False)
        self._copies.wait()

    def begin(self, step: int) -> None:
        """Start an update of a step; every shard will start from the present values."""
        self.is_kept_here = False
        if self._are_any:
            self._collect()
            if self._is_host:
                self._start_bytes.copy_(self._bytes)
            else:
                for tensors, _, started in self._lists:
                    _copy(started, tensors)
        if self.moving is not None:
            self.moving.begin(step)

    def restore(self) -> None:
        """Start a shard: reset the buffers to the values that the step began with."""
        if self._are_any:
            self._collect()
            if self._is_host:
                self._bytes.copy_(self._start_bytes)
            else:
                for tensors, _, started in self._lists:
                    _copy(tensors, started)
        if self.moving is not None:
            self.moving.restore()

    def keep(self) -> None:
        """Publish the values that the first non-empty shard left, for the next step."""
        self.is_kept_here = True
        if self._are_any:
            self._copy_out(1 - self.now)
        if self.moving is not None:
            self.moving.keep(1 - self.now)

    def started(self, name: str) -> torch.Tensor:
        """Return the value of one buffer when the step's passes began, on the host."""
        return on_host(Region(self._start, 0, self.slots).tensor(self._names.index(name)))

    def amend(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace some published values before the step ends, identically on every worker."""
        self._copies.wait()  # what was kept may still be on its way there
        region, self.is_kept_here = self._regions[1 - self.now], False
        for name, value in values.items():
            region.tensor(self._names.index(name)).copy_(value)

    def changed_names(self) -> list[str]:
        """Return the names of the buffers that the previous step changed."""
        if not self._shared:
            return []
        kept = zip(self._names, self._regions[self.now].tensors(), strict=True)
        return [name for name, value in kept if not torch.equal(value, self.started(name))]

    def settle(self) -> None:
        """Set the values that the step will end with, for the program's code in an update."""
        if self._shared:
            self._collect()
            self._copy_in(1 - self.now, are_here=self.is_kept_here)
        if self.moving is not None:
            self.moving.commit(1 - self.now)

    def commit(self) -> None:
        """Finish a step: set the buffers to the published values."""
        self.now = 1 - self.now
        if self._shared:
            self._collect()
            self._copy_in(self.now, are_here=self.is_kept_here)
        if self.moving is not None:
            self.moving.commit(self.now)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name, as the last pass left them."""
        self._collect()
        return dict(zip(self._names, self._tensors, strict=True))

    def _copy_out(self, copy: int) -> None:
        """Copy the values to one of the arena's copies, if the model has buffers."""
        self._collect()
        if not self._shared:
            return
        into = self._shared[copy]
        if self._is_host:
            into.copy_(self._bytes)
            return
        for tensors, views, _ in self._lists:
            _copy(views, tensors)  # the next pass may change the tensors meanwhile
        for start, stop, here in self._pieces():
            self._copies.to_host(into[start:stop], here)

    def _copy_in(self, copy: int, *, are_here: bool) -> None:
        """Set the values from one of the arena's copies, or from this worker's own block."""
        if not self._shared:
            return
        values = self._shared[copy]
        if self._is_host:
            self._bytes.copy_(values)
            return
        if not are_here:
            for start, stop, here in self._pieces():
                self._copies.to_device(here, values[start:stop])
        for tensors, views, _ in self._lists:
            _copy(tensors, views)
        self._versions = list(map(VERSION, self._tensors))

    def _changed(self, copy: int) -> dict[str, int]:
        """Return hashes, by name, of buffers that differ from one of the arena's copies.

        On an accelerator, changes that torch does not track (through ``.data``) are not detected.
        """
        self._collect()
        if not self._shared:
            return {}
        if self._is_host:
            is_same = torch.equal(self._bytes, self._shared[copy])
        else:
            is_same = self._versions == list(map(VERSION, self._tensors))
        if is_same:
            return {}
        kept = self._regions[copy].tensors()
        each = zip(self._names, map(hash_of, self._tensors), map(hash_of, kept), strict=True)
        return {name: here for name, here, there in each if here != there}

    def _pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the block's bytes, device by device, with their start and stop."""
        for start, stop in self._spans:
            yield start, stop, self._block.flat(start, stop - start, torch.uint8)

    def _collect(self) -> None:
        """Copy back the values of buffers whose tensor or `.data` was replaced."""
        if [*map(torch.Tensor.data_ptr, self._tensors)] != self._addresses != []:
            for name, tensor, place in zip(self._names, self._tensors, self._places, strict=True):
                replace_data(name, tensor, place, kind="buffer")
            self._versions = []
        for name, tensor, owners in zip(self._names, self._tensors, self._owners, strict=True):
            for module, key in owners:
                value = _now_at(module, key)
                if value is not tensor:
                    if len(owners) > 1:
                        raise RuntimeError(
                            f"buffer `{name}` belongs to {len(owners)} modules and must stay one, "
                            f"but {type(module).__name__} replaced it: change it in place."
                        )
                    _move(name, tensor, value, self._device)
                    module._buffers[key], self._versions = tensor, []
        for module, key in self._lazy:
            if _now_at(module, key) is not None:
                raise RuntimeError(
                    f"buffers must be tensors before training, but `{key}` of "
                    f"{type(module).__name__} was None and was filled in a forward pass: run the "
                    f"model once on one batch, then train."
                )


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    with torch.no_grad():
        if into:
            torch._foreach_copy_(into, source)


def _now_at(module: torch.nn.Module, key: str) -> torch.Tensor | None:
    try:
        return module._buffers[key]  # TorchScript's have no `get`
    except KeyError:
        return None


def _move(name: str, tensor: torch.Tensor, value: torch.Tensor | None, device: Device) -> None:
    if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
        seen = "None" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
        raise RuntimeError(
            f"buffer `{name}` must stay {tensor.dtype} of shape {tuple(tensor.shape)} while "
            f"training, but became {seen}: run the model once on one batch before, or keep the "
            f"value elsewhere."
        )
    if value.device != tensor.device and not device.has(value):  # as a split model's may be
        raise RuntimeError(
            f"buffer `{name}` must stay on {tensor.device} while training, but is on "
            f"{value.device}: move the model between two loops, and what a forward pass computes "
            f"to where its inputs are."
        )
    tensor.data.copy_(value.detach())

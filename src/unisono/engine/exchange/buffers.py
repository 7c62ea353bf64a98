"""The model's buffers (for example BatchNorm's statistics): every shard starts from the same ones.

Those that the first non-empty shard leaves are kept, as DDP keeps rank 0's. The arena holds them
twice: a step reads one copy and writes the other, then the two change places. A buffer keeps its
identity, as a parameter does; only its memory is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from unisono.engine.exchange.arena import (
    Arena,
    Region,
    Slot,
    Span,
    lay_out,
    private_bytes,
    size_of,
    spans_of,
)
from unisono.engine.exchange.moving import Moving
from unisono.engine.state.contents import buffer_at, homes_of_buffers, lazy_homes
from unisono.runtime.device import Copies, Device, by_device


class Buffers:
    """The model's buffers, saved and restored as a whole. Final.

    Args:
        copies: between it and the host.

    Attributes:
        slots: the layout that the arena reserves, twice.
        now: which of the arena's two copies is the present one.
        is_kept_here: whether this worker has published those for the next step.
        moving: parameters that live likewise; None: every one has an optimizer.
    """

    def __init__(self, model: torch.nn.Module, device: Device, copies: Copies) -> None:
        named = homes_of_buffers(model)
        self._names = list(named)
        self._homes = list(named.values())
        self._lazy = lazy_homes(model)
        self._tensors = [buffer_at(homes[0]) for homes in self._homes]
        self.slots = lay_out(dict(zip(named, self._tensors, strict=True)))
        self._device, self._copies = device, copies
        self._values = BufferValues(self._tensors, self.slots, device, copies)
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        self.now, self.is_kept_here = 0, False
        self.moving: Moving | None = None

    def bind(self, arena: Arena) -> None:
        """Move the buffers into the block, with the values they have."""
        self._values.bind()
        self.now, self._regions = 0, arena.buffers
        if self.slots:
            self._shared = (arena.buffers[0].everything(), arena.buffers[1].everything())

    def give(self) -> None:
        """Give this worker's values to all."""
        if self._shared is not None:
            self._values.give(self._shared[self.now])
            self._copies.wait()

    def load(self, now: int) -> None:
        """Take over the values of one of the arena's copies, the present one from now on."""
        for tensor, homes in zip(self._tensors, self._homes, strict=True):
            for module, key in homes:
                # What a forward pass put in its place is undone, too.
                module._buffers[key] = tensor
        self.now = now
        if self._shared is not None:
            self._values.take(self._shared[now])
            self._copies.wait()

    def unbind(self) -> None:
        """Give the model buffers with memory of their own again."""
        self._values.unbind()
        self._shared = None

    def begin(self, step: int) -> None:
        """Start an update of a step: every shard will start from the buffers as they are now."""
        self._collect()
        if self.moving is not None:
            self.moving.begin(step)
        self.is_kept_here = False
        if self._shared is not None:
            self._values.save()

    def restore(self) -> None:
        """Start a shard: the buffers are those that the step began with."""
        self._collect()
        if self.moving is not None:
            self.moving.restore()
        if self._shared is not None:
            self._values.restore()

    def keep(self) -> None:
        """Publish what the first non-empty shard left, for the next step."""
        self._collect()
        self.is_kept_here = True
        if self.moving is not None:
            self.moving.keep(1 - self.now)
        if self._shared is not None:
            self._values.give(self._shared[1 - self.now])

    def settle(self) -> None:
        """Let an update of whole parameters see what was kept of others."""
        if self.moving is not None:
            self.moving.commit(1 - self.now)

    def commit(self) -> None:
        """Finish a step: the buffers are those that were kept."""
        self.now = 1 - self.now
        if self.moving is not None:
            self.moving.commit(self.now)
        if self._shared is not None:
            self._collect()
            self._values.take(self._shared[self.now], are_here=self.is_kept_here)

    def values(self) -> dict[str, torch.Tensor]:
        """Give the buffers by name, as the pass before has left them."""
        self._collect()
        return dict(zip(self._names, self._tensors, strict=True))

    def _collect(self) -> None:
        """Take back the values of buffers that the forward pass replaced by new tensors.

        Raises:
            RuntimeError: one has another shape, another dtype, or was None before.
        """
        for name, tensor, homes in zip(self._names, self._tensors, self._homes, strict=True):
            for module, key in homes:
                value = _now_at(module, key)
                if value is not tensor:
                    if len(homes) > 1:
                        raise RuntimeError(
                            f"buffer `{name}` belongs to {len(homes)} modules and must stay one, "
                            f"but {type(module).__name__} replaced it: change it in place."
                        )
                    _move(name, tensor, value, self._device)
                    module._buffers[key] = tensor
        for module, key in self._lazy:
            if _now_at(module, key) is not None:
                raise RuntimeError(
                    f"buffers must be tensors before training, but `{key}` of "
                    f"{type(module).__name__} was None and was filled in a forward pass: run the "
                    f"model once on one batch, then train."
                )


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


class BufferValues:
    """The values of buffers, copied as one block of bytes. Final.

    On the CPU the buffers themselves lie in the block. On an accelerator they keep memory of their
    own, and are copied to and from blocks there.

    Args:
        slots: where each lies in a block.
        copies: between it and the host.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        slots: tuple[Slot, ...],
        device: Device,
        copies: Copies,
    ) -> None:
        self._tensors, self._slots, self._is_host = tensors, slots, device.is_host
        self._copies, size = copies, size_of(slots)
        spans = spans_of(slots, tensors) if device.is_divided else [Span(0, size, device.torch)]
        self._block, self._start = (private_bytes(size, device, spans) for _ in range(2))
        self._spans = [(start, stop) for start, stop, _ in spans]
        if self._is_host:
            self._bytes = self._block.flat(0, size, torch.uint8)
            self._start_bytes = self._start.flat(0, size, torch.uint8)

    def bind(self) -> None:
        """Have the buffers where the others of this object expect them."""
        views = Region(self._block, 0, self._slots).tensors()
        if self._is_host:
            for tensor, view in zip(self._tensors, views, strict=True):
                view.copy_(tensor)
                tensor.data = view
            return
        started = Region(self._start, 0, self._slots).tensors()
        # Of one dtype and one device each, so that each list is copied at once.
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
        """Have the buffers in memory of their own; on an accelerator they never left it."""
        if self._is_host:
            for tensor in self._tensors:
                tensor.data = tensor.data.clone()

    def give(self, into: torch.Tensor) -> None:
        """Copy the values to a block on the host."""
        if self._is_host:
            into.copy_(self._bytes)
            return
        for tensors, views, _ in self._lists:
            _copy(views, tensors)  # the next pass may change the tensors meanwhile
        for start, stop, here in self._pieces():
            self._copies.to_host(into[start:stop], here)

    def take(self, values: torch.Tensor, *, are_here: bool = False) -> None:
        """Set the values from a block on the host; or from where they are, if this gave them."""
        if self._is_host:
            self._bytes.copy_(values)
            return
        if not are_here:
            for start, stop, here in self._pieces():
                self._copies.to_device(here, values[start:stop])
        for tensors, views, _ in self._lists:
            _copy(tensors, views)

    def _pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Give bytes of the block that are on one device, from where to where."""
        for start, stop in self._spans:
            yield start, stop, self._block.flat(start, stop - start, torch.uint8)

    def save(self) -> None:
        """Note the values, for :meth:`restore`."""
        if self._is_host:
            self._start_bytes.copy_(self._bytes)
        else:
            for tensors, _, started in self._lists:
                _copy(started, tensors)

    def restore(self) -> None:
        """Set the values to what was noted."""
        if self._is_host:
            self._bytes.copy_(self._start_bytes)
        else:
            for tensors, _, started in self._lists:
                _copy(tensors, started)


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    with torch.no_grad():
        if into:
            torch._foreach_copy_(into, source)

"""The model's buffers (for example BatchNorm's statistics): every shard starts from the same ones.

Those that the first non-empty shard leaves are kept, as DDP keeps rank 0's. The arena holds them
twice: a step reads one copy and writes the other, then the two change places. A buffer keeps its
identity, as a parameter does; only its memory is exchanged.
"""

from __future__ import annotations

import torch

from unisono.device import bytes_of
from unisono.exchange.arena import Arena, Slot, lay_out, size_of
from unisono.state.model_buffers import buffer_at, homes_of_buffers, lazy_homes


class Buffers:
    """The model's buffers, in one private block that is saved and restored as a whole. Final.

    Attributes:
        slots: the layout that the arena reserves, twice.
        now: which of the arena's two copies is the present one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = homes_of_buffers(model)
        self._names = list(named)
        self._homes = list(named.values())
        self._lazy = lazy_homes(model)
        self._tensors = [buffer_at(homes[0]) for homes in self._homes]
        self.slots = lay_out(dict(zip(named, self._tensors, strict=True)))
        self._block = torch.zeros(size_of(self.slots), dtype=torch.uint8)
        self._start = torch.zeros_like(self._block)
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        self.now = 0

    def bind(self, arena: Arena) -> None:
        """Move the buffers into the block, with the values they have."""
        for tensor, slot in zip(self._tensors, self.slots, strict=True):
            view = _view(self._block, slot)
            view.copy_(tensor)
            tensor.data = view
        self.now = 0
        if self.slots:
            self._shared = (arena.buffers[0].everything(), arena.buffers[1].everything())

    def give(self) -> None:
        """Give this worker's values to all."""
        if self._shared is not None:
            self._shared[self.now].copy_(self._block)

    def load(self, now: int) -> None:
        """Take over the values of one of the arena's copies, the present one from now on."""
        for tensor, homes in zip(self._tensors, self._homes, strict=True):
            for module, key in homes:
                # What a forward pass put in its place is undone, too.
                module._buffers[key] = tensor
        self.now = now
        if self._shared is not None:
            self._block.copy_(self._shared[now])

    def unbind(self) -> None:
        """Give the model buffers with memory of their own again."""
        for tensor in self._tensors:
            tensor.data = tensor.data.clone()
        self._shared = None

    def begin(self) -> None:
        """Start a step: every shard will start from the buffers as they are now."""
        self._collect()
        if self._shared is not None:
            self._start.copy_(self._block)

    def restore(self) -> None:
        """Start a shard: the buffers are those that the step began with."""
        self._collect()
        if self._shared is not None:
            self._block.copy_(self._start)

    def keep(self) -> None:
        """Publish what the first non-empty shard left, for the next step."""
        self._collect()
        if self._shared is not None:
            self._shared[1 - self.now].copy_(self._block)

    def commit(self) -> None:
        """Finish a step: the buffers are those that were kept."""
        if self._shared is not None:
            self._collect()
            self.now = 1 - self.now
            self._block.copy_(self._shared[self.now])

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
                    _move(name, tensor, value)
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


def _move(name: str, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
        seen = "None" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
        raise RuntimeError(
            f"buffer `{name}` must stay {tensor.dtype} of shape {tuple(tensor.shape)} while "
            f"training, but became {seen}: run the model once on one batch before, or keep the "
            f"value elsewhere."
        )
    tensor.data.copy_(value.detach())


def _view(block: torch.Tensor, slot: Slot) -> torch.Tensor:
    if slot.numel == 0:
        return torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype)
    # A storage of its own: compiled code refuses to change inputs that share one.
    flat = torch.frombuffer(bytes_of(block), dtype=slot.dtype, count=slot.numel, offset=slot.offset)
    return flat.as_strided(slot.shape, slot.stride)

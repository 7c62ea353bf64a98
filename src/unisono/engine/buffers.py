"""Buffers of the model (BatchNorm's statistics, say): every shard starts from the same ones.

Those that the first non-empty shard leaves behind are kept, as DDP keeps rank 0's. The arena
holds them twice: the step reads one copy and writes the other, then the two change places.
"""

from __future__ import annotations

import torch

from unisono.engine.arena import Arena, Slot, lay_out, size_of

Home = tuple[torch.nn.Module, str]


def homes_of_buffers(model: torch.nn.Module) -> dict[str, list[Home]]:
    """Find each distinct buffer by its first full name, with every place that holds it."""
    first_names: dict[int, str] = {}
    homes: dict[str, list[Home]] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                first = first_names.setdefault(id(buffer), full_name)
                homes.setdefault(first, []).append((module, name))
    return homes


class Buffers:
    """The model's buffers, in one private block that is saved and restored as a whole. Final."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._homes = list(homes_of_buffers(model).values())
        self._slots = lay_out(_buffer(homes[0]) for homes in self._homes)
        self._block = torch.zeros(size_of(self._slots), dtype=torch.uint8)
        self._views = [_view(self._block, slot) for slot in self._slots]
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        self._now = 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The layout that the arena reserves, twice."""
        return tuple(self._slots)

    def bind(self, arena: Arena, *, is_first: bool) -> None:
        """Move the buffers into the block; rank 0 (`is_first`) also gives its values to all."""
        for view, homes in zip(self._views, self._homes, strict=True):
            _move(view, homes)
        if self._slots:
            self._shared = (arena.buffers[0].everything(), arena.buffers[1].everything())
            self._now = 0
            if is_first:
                self._shared[0].copy_(self._block)

    def unbind(self) -> None:
        """Give the model buffers of its own again."""
        for view, homes in zip(self._views, self._homes, strict=True):
            own = view.clone()
            for module, name in homes:
                module._buffers[name] = own
        self._shared = None

    def restore(self) -> None:
        """Start a shard: the buffers are those that the step began with."""
        if self._shared is not None:
            self._collect()
            self._block.copy_(self._shared[self._now])

    def keep(self) -> None:
        """Publish what the first non-empty shard left, for the next step."""
        if self._shared is not None:
            self._collect()
            self._shared[1 - self._now].copy_(self._block)

    def commit(self) -> None:
        """Finish a step: what was kept is now what every shard starts from."""
        if self._shared is not None:
            self._now = 1 - self._now
            self.restore()

    def _collect(self) -> None:
        """Take back buffers that the forward pass replaced by new tensors."""
        for view, homes in zip(self._views, self._homes, strict=True):
            if _buffer(homes[0]) is not view:
                _move(view, homes)


def _buffer(home: Home) -> torch.Tensor:
    module, name = home
    buffer = module._buffers[name]
    if buffer is None:
        raise ValueError(
            f"buffer `{name}` of {type(module).__name__} must stay a tensor while training, but "
            f"is None now: assign a tensor of the same shape instead."
        )
    return buffer


def _move(view: torch.Tensor, homes: list[Home]) -> None:
    view.copy_(_buffer(homes[0]).detach())
    for module, name in homes:
        module._buffers[name] = view


def _view(block: torch.Tensor, slot: Slot) -> torch.Tensor:
    flat = block[slot.offset : slot.offset + slot.numel * slot.dtype.itemsize].view(slot.dtype)
    # `.data`, because autograd counts changes of plain views together: one layer's statistics
    # would seem to change when another's do.
    return flat.as_strided(slot.shape, slot.stride).data

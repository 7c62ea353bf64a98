"""Which parts of a model can be computed apart? The units that a model can be cut between.

A unit is a module with parameters or buffers that is not divided further, or a parameter or buffer
that a divided module has itself. Modules are divided into what they consist of, but not torch's own
(attention, recurrent layers), whose code may use what they hold without calling it. Modules without
tensors are no units: they are computed where their inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

_DIVIDED = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
_OF_TORCH = "torch."


@dataclass(frozen=True)
class Unit:
    """A part of a model that is on one device."""

    name: str  # of the module, or of the parameter or buffer
    module: nn.Module | None  # the module; None for a parameter or buffer
    parameters: dict[str, nn.Parameter]  # by their full names, those that no unit before it has
    buffers: dict[str, torch.Tensor]  # likewise
    # whether it uses no others, as far as is known: it is one of torch's own modules, and all it
    # holds is its own
    is_alone: bool

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {**self.parameters, **self.buffers}

    @property
    def num_bytes(self) -> int:
        """What training it takes: parameters, gradients, an optimizer's state as Adam's, buffers.

        Where a parameter needs no gradient, only itself.
        """
        copies = [4 if p.requires_grad else 1 for p in self.parameters.values()]
        sizes = [p.nbytes for p in self.parameters.values()]
        held = sum(size * count for size, count in zip(sizes, copies, strict=True))
        return held + sum(buffer.nbytes for buffer in self.buffers.values())


def units_of(model: nn.Module) -> list[Unit]:
    """List the units of a model in the order in which they are registered.

    A parameter that several units have (tied weights) is the first one's.
    """
    seen: set[int] = set()
    return list(_units_within(model, "", seen))


def is_divided(module: nn.Module) -> bool:
    """Tell whether a module's parts may be on several devices."""
    if isinstance(module, torch.jit.ScriptModule) or parametrize.is_parametrized(module):
        return False
    if not any(_has_tensors(child) for child in module.children()):
        return False
    return isinstance(module, _DIVIDED) or not type(module).__module__.startswith(_OF_TORCH)


def _units_within(module: nn.Module, name: str, seen: set[int]) -> Iterator[Unit]:
    if id(module) in seen or not _has_tensors(module):
        return
    seen.add(id(module))
    if not is_divided(module):
        yield _unit(module, name, seen)
        return
    for key, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            full = _joined(name, key)
            yield Unit(full, None, {full: parameter}, {}, is_alone=False)
    for key, buffer in module._buffers.items():
        if buffer is not None and id(buffer) not in seen:
            seen.add(id(buffer))
            full = _joined(name, key)
            yield Unit(full, None, {}, {full: buffer}, is_alone=False)
    for key, child in module.named_children():
        yield from _units_within(child, _joined(name, key), seen)


def _unit(module: nn.Module, name: str, seen: set[int]) -> Unit:
    parameters, buffers = dict(module.named_parameters(name)), dict(module.named_buffers(name))
    num_held = len(parameters) + len(buffers)
    parameters = {full: p for full, p in parameters.items() if id(p) not in seen}
    buffers = {full: b for full, b in buffers.items() if id(b) not in seen}
    seen.update(map(id, (*parameters.values(), *buffers.values())))
    is_alone = num_held == len(parameters) + len(buffers)
    is_of_torch = type(module).__module__.startswith(_OF_TORCH)
    return Unit(name, module, parameters, buffers, is_alone=is_alone and is_of_torch)


def _has_tensors(module: nn.Module) -> bool:
    tensors = (*module.parameters(), *module.buffers())
    return bool(tensors)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

"""Copies of a model on further devices of the same process, which follow the model.

Tensors are copied; whatever else modules hold as plain Python values is shared, so that a program
that changes it between two steps changes it for all copies. What a program replaces (an attribute,
`requires_grad`, `eval()`, a hook) is found when a step begins, and replaced in the copies, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, FunctionType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (
    *(NoneType, bool, int, float, complex, str, bytes, type, Enum),
    *(FunctionType, BuiltinFunctionType, torch.dtype, torch.Size),
)
_DEEPEST = 6


class ModelCopies:
    """A model's copies on some devices. Final.

    Args:
        model: whose parameters and buffers are on one device.
        devices: where the copies are to be.

    Attributes:
        models: the copies, in the order of `devices`.

    Raises:
        ValueError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        _check_not_compiled(model)
        self._modules, self._parameters = [*model.modules()], [*model.parameters()]
        self._copies = [_Copy(model, device) for device in devices]
        self.models = [made.model for made in self._copies]
        self._note()

    def follow(self) -> None:
        """Have the copies take over what the program has replaced since this was called last."""
        if self._identities() == self._noted and self._modes() == self._noted_modes:
            return
        for at, (module, before) in enumerate(zip(self._modules, self._before, strict=True)):
            now = vars(module)
            changed = [
                name
                for name, value in now.items()
                if name not in _REGISTERED
                and (before.get(name, self) is not value or _is_hooks(name))
            ]
            gone = before.keys() - now.keys()
            for made in self._copies:
                made.replace(at, {name: now[name] for name in changed}, gone)
        for made in self._copies:
            made.take_modes(self._parameters)
        self._note()

    def _note(self) -> None:
        self._before = [dict(vars(module)) for module in self._modules]  # keeps them alive, too
        self._tables = [*map(vars, self._modules)]
        self._hooks = [
            value
            for of in self._before
            for name, value in of.items()
            if _is_hooks(name) and isinstance(value, dict)
        ]
        self._noted, self._noted_modes = self._identities(), self._modes()

    def _identities(self) -> list[int]:
        values = chain.from_iterable(table.values() for table in self._tables)
        return [*map(id, values), *chain.from_iterable(self._hooks)]

    def _modes(self) -> list[Any]:
        return [
            (p.requires_grad, *(p._backward_hooks or ()), *(p._post_accumulate_grad_hooks or ()))
            for p in self._parameters
        ]


def _check_not_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(
                f"with several `devices`, a model must be the plain one, of which each device gets "
                f"a copy, but `{name or 'model'}` is compiled by torch: leave `torch.compile` out, "
                f"or start a worker for each device (`unisono run`)."
            )


class _Empty:
    """All that its objects have is their ``__dict__``."""


class _Copy:
    """One copy. Final."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._home = next(model.parameters()).device
        self._device, self._handles = device, list[Any]()
        tensors = _tensors_of(model)
        self._there = {id(t): _copied(t, device) for t in tensors}
        self.model: nn.Module = self._own(model, dict(self._there), _shared_by(model))
        self._check(model)
        self._modules = [*self.model.modules()]
        for module, own in zip(model.modules(), self._modules, strict=True):
            self._there[id(module)] = own
            vars(own).update({n: device for n, d in vars(own).items() if self._is_home(d)})
        self.take_modes([*model.parameters()])

    def replace(self, at: int, values: Mapping[str, Any], gone: set[str]) -> None:
        """Set attributes of the module with number `at` as the model's has them."""
        table = vars(self._modules[at])
        for name in gone:
            table.pop(name, None)
        for name, value in values.items():
            is_shared = not _is_hooks(name) and _is_plain(value)
            table[name] = value if is_shared else self._own(value, dict(self._there), [])

    def take_modes(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take over from the model's parameters what a copy of a tensor does not have."""
        while self._handles:
            self._handles.pop().remove()
        for parameter in parameters:
            own = self._there[id(parameter)]
            own.requires_grad_(parameter.requires_grad)
            registered: tuple[tuple[Any, Any], ...] = (
                (parameter._backward_hooks, own.register_hook),
                (parameter._post_accumulate_grad_hooks, own.register_post_accumulate_grad_hook),
            )
            for hooks, register in registered:
                for hook in (hooks or {}).values():
                    self._handles.append(register(self._own(hook, dict(self._there), [])))

    def _own(self, value: Any, known: dict[int, Any], shared: Sequence[Any]) -> Any:
        """Copy something; what is `known` by its identity, or shared, is not copied again."""
        if self._is_home(value):
            return self._device
        known |= {id(each): each for each in shared}
        with _TensorsTo(self._device, self._home):
            try:
                return copy.deepcopy(value, known)
            except Exception as error:
                raise ValueError(
                    f"`devices` must each get a copy of the model, but `copy.deepcopy` of it "
                    f"raises {type(error).__name__}: {error}. Leave out of the model what cannot "
                    f"be copied, or pass `device=` with one device."
                ) from error

    def _is_home(self, value: Any) -> bool:
        return isinstance(value, torch.device) and value == self._home

    def _check(self, model: nn.Module) -> None:
        own = {name: id(tensor) for name, tensor in _named(self.model)}
        for name, tensor in _named(model):
            if own.get(name) != id(self._there[id(tensor)]):
                raise ValueError(
                    f"`devices` must each get a copy of the model, but its copy has not its own "
                    f"`{name}`, as {type(model).__name__} or a module in it copies itself in a way "
                    f"of its own (TorchScript does): pass `device=` with one device."
                )


class _TensorsTo(TorchFunctionMode):
    """Has tensors that are no parameters copied to a device, if they are where the model is."""

    def __init__(self, device: torch.device, home: torch.device) -> None:
        super().__init__()
        self._device, self._home = device, home

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, known = args
            if id(tensor) not in known:
                target = self._device if tensor.device == self._home else tensor.device
                known[id(tensor)] = _copied(tensor, target)
            return known[id(tensor)]
        return func(*args, **(kwargs or {}))


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Memory of its own for each, as the model's have: kernels may be chosen by where tensors begin.
    with torch.no_grad():
        own = torch.empty_like(tensor, device=device, requires_grad=False).copy_(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        own = type(tensor)(own, tensor.requires_grad)
        vars(own).update(vars(tensor))  # what a program has noted there
    return own


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """List parameters and buffers, also of modules that are kept as plain attributes."""
    beside = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, nn.Module) and name not in _REGISTERED
    ]
    found = {id(t): t for root in (model, *beside) for _, t in _named(root)}
    return [*found.values()]


def _shared_by(model: nn.Module) -> list[Any]:
    """List what copies and the model may hold together: plain values, such as a configuration."""
    return [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _REGISTERED and not _is_hooks(name) and _is_plain(value)
    ]


def _is_hooks(name: str) -> bool:
    return name.startswith("_") and "_hooks" in name


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Tell whether something holds neither tensors nor modules nor methods of either."""
    if isinstance(value, _PLAIN):
        return True
    if depth == _DEEPEST or isinstance(value, (torch.Tensor, nn.Module)):
        return False
    if isinstance(value, Mapping):
        parts: Any = chain(value.keys(), value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif type(value) is SimpleNamespace or type(value).__basicsize__ == _Empty.__basicsize__:
        parts = vars(value).values()
    else:
        return False  # it may hold more than Python sees, as a `functools.partial` does
    return all(_is_plain(part, depth + 1) for part in parts)

"""What does a program keep beside its model's parameters and buffers? A look at it, to compare.

A look starts from the loss function and from the model's modules, and follows what the program has
written itself::

    a function   its closure, defaults and attributes, and globals that its code names
    a module     its plain attributes, and tensors that are no buffers; those of its class
    an object    likewise
    a container  its length, and what a small one holds

Numbers and strings are compared as they are, tensors and arrays by a sum of their bits. What
libraries keep for themselves is not looked at.
"""

from __future__ import annotations

import functools
import itertools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_SMALL, _AT_MOST = 1_000, 100_000  # elements of a container; places of a look
_WHOLE = 1 << 24  # elements of a tensor; of a larger one some are looked at
Plain = bool | int | float | complex | str | bytes | None
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LIBRARIES = ("torch", "numpy", "unisono", "torchmetrics")


class Look:
    """What is kept now, by place. Final.

    Args:
        model: which is trained; its parameters and buffers are not looked at.
        functions: the loss function, for example.

    Attributes:
        values: by place, the value; each place is an owner and what the value is called there.
        holders: where plain values lie that can be set: a container or an object, and the key.
        metrics: objects of torchmetrics, which count what they are given.
    """

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self.values: dict[tuple[int, str], Any] = {}
        self.holders: dict[tuple[int, str], tuple[Any, Any]] = {}
        own = itertools.chain(model.parameters(), model.buffers())
        self.metrics: list[Any] = []
        self._seen = set(map(id, own))
        self._owner = 0
        for function in functions:
            self._follow(function)
        for module in model.modules():
            self._follow(module)

    def changed_in(self, later: Look) -> Iterator[tuple[int, str]]:
        """Give the places that a later look finds with another value."""
        for place, value in self.values.items():
            if place in later.values and not _is_same(value, later.values[place]):
                yield place

    def _follow(self, thing: Any) -> None:
        """Look at what a function, a module or an object of the program holds."""
        if id(thing) in self._seen or len(self.values) > _AT_MOST:
            return
        self._seen.add(id(thing))
        before, self._owner = self._owner, id(thing)
        if isinstance(thing, functools.partial):
            called = f"`{{}}` of the partial `{_name_of(thing)}`"
            for key, value in [*enumerate(thing.args), *thing.keywords.items()]:
                self._take(called, f"argument {key}", value)
            self._follow(thing.func)
        elif isinstance(thing, MethodType):
            self._follow(thing.__self__)
            self._follow(thing.__func__)
        elif isinstance(thing, FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self._class(thing)
        elif isinstance(thing, nn.Module) or _is_own(type(thing).__module__):
            self._object(thing)
        self._follow_wrapped(thing)
        self._owner = before

    def _follow_wrapped(self, thing: Any) -> None:
        if not isinstance(thing, (nn.Module, type)) and hasattr(thing, "__wrapped__"):
            self._follow(thing.__wrapped__)

    def _function(self, function: FunctionType) -> None:
        code, name = function.__code__, _name_of(function)
        if not _is_own(function.__globals__.get("__name__", "")):
            return
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty yet
                self._take(f"`{{}}` in the closure of `{name}`", key, cell.cell_contents, cell)
        names = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        for key, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            self._take(f"the default `{{}}` of `{name}`", key, value)
        for key, value in (function.__kwdefaults__ or {}).items():
            self._take(f"the default `{{}}` of `{name}`", key, value)
        for key, value in vars(function).items():
            if key != "__wrapped__":
                self._take(f"`{name}.{{}}`", key, value, vars(function))
        named = set(_names_in(code))
        self._of_module(function.__globals__, named, "the global `{}`")

    def _of_module(self, table: Mapping[str, Any], named: set[str], called: str) -> None:
        """Look at those globals of a module that a function's code names."""
        for key in sorted(named & table.keys()):
            value = table[key]
            if isinstance(value, ModuleType):
                if _is_own(value.__name__):
                    within = f"`{{}}` of the module `{value.__name__}`"
                    if id(value) not in self._seen:
                        self._seen.add(id(value))
                        self._of_module(vars(value), named, within)
                    self._seen.discard(id(value))
            else:
                self._owner = id(table)
                self._take(called, key, value, table)

    def _object(self, thing: Any) -> None:
        kind = type(thing)
        if kind.__module__.partition(".")[0] == "torchmetrics":
            self.metrics += [thing] if hasattr(thing, "_defaults") else []
            for metric in thing.values() if isinstance(thing, nn.ModuleDict) else ():
                self._follow(metric)
            return
        called = f"`self.{{}}` of `{kind.__name__}`"
        for key, value in _attributes(thing):
            self._take(called, key, value, thing)
        if isinstance(thing, nn.Module):
            for table in (thing._parameters, thing._buffers, thing._modules):
                for key, value in dict(table.items()).items():
                    self._take(called, key, value)
        for each in kind.__mro__:
            self._follow(each)

    def _class(self, kind: type) -> None:
        if not _is_own(kind.__module__):
            return
        for key, value in vars(kind).items():
            if isinstance(value, (staticmethod, classmethod)):
                self._follow(value.__func__)
            elif isinstance(value, FunctionType):
                self._follow(value)
            elif not key.startswith("__"):
                self._take(f"`{kind.__name__}.{{}}`", key, value, kind)

    def _take(
        self, called: str, name: str, value: Any, holder: Any = None, key: Any = None
    ) -> None:
        """Note what lies at one place, and what that holds in turn."""
        if isinstance(value, np.generic):
            value = value.item()
        place = (self._owner, called.format(name))
        if isinstance(value, itertools.count):
            self.values[place] = repr(value)
        elif isinstance(value, Plain):
            self.values[place] = value
            if not isinstance(holder, (tuple, type(None))):
                self.holders[place] = (holder, name if key is None else key)
        elif id(value) in self._seen:
            pass
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            with suppress(Exception):  # such as one without storage
                self.values[place] = bits_of(value)
        elif isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            self._container(called, name, value)
        else:
            self._follow(value)

    def _container(self, called: str, name: str, value: Any) -> None:
        self._seen.add(id(value))
        self.values[(self._owner, called.format(name))] = (len(value),)
        if isinstance(value, (set, frozenset)) or len(value) > _SMALL:
            return
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in list(entries):
            if isinstance(key, (str, int)):
                self._take(called, f"{name}[{key!r}]", entry, value, key)


def put_back(holder: Any, key: Any, value: Any) -> None:
    """Give a plain value of a look back to where it was."""
    if hasattr(holder, "cell_contents"):
        holder.cell_contents = value
    elif isinstance(holder, (dict, list, deque)):
        holder[key] = value
    else:
        with suppress(AttributeError):  # it is frozen
            setattr(holder, key, value)


def states_of(metrics: Sequence[Any]) -> list[tuple[Any, str, Any]]:
    """Copy what metrics have counted: by metric and name."""
    names = [(metric, [*metric._defaults, "_update_count", "_computed"]) for metric in metrics]
    return [(metric, name, deepcopy(getattr(metric, name))) for metric, of in names for name in of]


def bits_of(value: torch.Tensor | np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Give what tells a tensor or an array from another: its form, and a sum of its bits."""
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(np.array(value[:: max(1, value.size // _WHOLE)]))
    tensor = value.detach()
    form = (str(tensor.dtype), tuple(tensor.shape))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.numel() > _WHOLE:
        tensor = tensor.reshape(-1)[:: tensor.numel() // _WHOLE | 1]
    bits = tensor.view(_BITS[tensor.itemsize])
    return (*form, bits.sum(dtype=torch.int64).item())


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, float) and isinstance(after, float) and before != before:
        return after != after
    return type(before) is type(after) and bool(before == after)


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    found = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                found[name] = getattr(thing, name)
    inner = _OF_ANY_MODULE if isinstance(thing, nn.Module) else ()
    return [(name, value) for name, value in found.items() if name not in inner]


def _names_in(code: CodeType) -> Iterator[str]:
    """Give the names that a function's code looks up, and those of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


@functools.lru_cache(maxsize=4096)
def _is_own(module: str) -> bool:
    """Tell whether a module is the program's, and not of a library."""
    top = module.partition(".")[0]
    if (top in sys.stdlib_module_names and top != "__main__") or top in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    paths = sysconfig.get_paths()
    return not file.startswith((paths["purelib"], paths["platlib"])) and "-packages" not in file

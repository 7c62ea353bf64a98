"""What does a program keep beside its model's parameters and buffers? A look at it, to compare.

A look reads what the loss function and the model's modules lead to (``reach.py``). Numbers and
strings are compared as they are, containers by their lengths, tensors and arrays by a sum of their
bits. What libraries keep for themselves is not looked at.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import nn

from unisono.reach import Holder, reach

_WHOLE = 1 << 24  # elements of a tensor; of a larger one some are looked at
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_TABLES = re.compile(r"\._(?:modules|buffers|parameters)\['(\w+)'\]")
_LIBRARYS = re.compile(r"\.__\w+__$|_hooks")  # what hooks count is theirs
Plain = bool | int | float | complex | str | bytes | None


class Look:
    """What is kept now, by the way to it. Final.

    Args:
        model: which is trained; its parameters and buffers are not looked at.
        functions: the loss function, and what gives features where there is such a one.

    Attributes:
        values: by way, what can be compared.
        metrics: objects of torchmetrics, which count what they are given.
    """

    def __init__(self, model: nn.Module, functions: Sequence[Any]) -> None:
        self.values: dict[str, Any] = {}
        self.metrics: list[Any] = []
        self._places: dict[str, tuple[Holder, str]] = {}
        parts = (model.parameters(), model.buffers(), model.modules())
        self._own = set(map(id, itertools.chain(*parts)))
        roots: dict[str, Any] = {"model": model}
        for name, function in zip(("loss", "embed"), map(_programs, functions), strict=False):
            roots |= {name: function, f"vars({name})": getattr(function, "__dict__", {})}
        for holder in reach(roots).holders:
            for name, value in holder.read():
                if id(value) not in self._own and not _LIBRARYS.search(holder.path + name):
                    self._note(holder, name, value)

    def changed_in(self, later: Look) -> list[str]:
        """Give the ways that a later look finds to lead to other values."""
        there = later.values
        return [way for way, one in self.values.items() if way in there and one != there[way]]

    def put_back(self, way: str, value: Any) -> bool:
        """Give a plain value back to where this look has found another; False if it cannot be."""
        holder, name = self._places.get(way, (None, ""))
        table: Any = getattr(getattr(holder, "read", None), "args", (None,))[0]
        if isinstance(table, dict):
            key = next((key for key in table if name in (f".{key}", f"[{key!r:.40}]")), None)
            if isinstance(table.get(key), CellType):
                table[key].cell_contents = value
            else:
                table[key] = value
        elif isinstance(table, list):
            table[int(name[1:-1])] = value
        return isinstance(table, (dict, list))

    def _note(self, holder: Holder, name: str, value: Any) -> None:
        way = _TABLES.sub(r".\1", holder.path + name)
        if way in self.values:
            return  # of a base class
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Plain):
            self.values[way] = value if value == value else repr(value)  # NaN is like NaN
            self._places[way] = holder, name
        elif isinstance(value, itertools.count):
            self.values[way] = repr(value)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            with suppress(Exception):  # such as one without storage
                self.values[way] = bits_of(value)
        elif isinstance(value, _CONTAINERS):
            self.values[way] = (len(value),)
        elif type(value).__module__.startswith("torchmetrics."):
            of = value.values() if isinstance(value, nn.ModuleDict) else [value]
            self.metrics += [metric for metric in of if hasattr(metric, "_defaults")]
        elif isinstance(value, nn.Module):  # such as a teacher
            for part, parameter in value.named_parameters():
                if id(parameter) not in self._own:
                    self._note(holder, f"{name}.{part}", parameter)


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


def _programs(function: Any) -> Any:
    """Give the program's own function, which ours may be around."""

    def is_own(function: Any) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        return not module.startswith("unisono.")

    return inspect.unwrap(function, stop=is_own)

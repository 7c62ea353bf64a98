"""What a program changes between steps and keeps for itself, as a part of its run.

::

    a loop begins    watch ─► before                    what the program has made of it
    on_begin         has_begun                          what differs from rank to rank stays there
    a snapshot       state_dict ─► values, rest         what differs from before; the rest
    back, resumed    load_state_dict

Looked at is whatever its callbacks, optimizers and schedules lead to (``reach.py``): attributes of
its own objects, closures, globals and class attributes that their code names; and the plain
attributes of the model's layers. Kept are plain values, tensors and arrays, also in lists, tuples,
sets and dicts, and other modules, such as a teacher. Whatever else there is stays as it is.
"""

from __future__ import annotations

import copy
import functools
import json
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from unisono.engine.state import packing
from unisono.engine.state.optimizer_state import moved, states_here
from unisono.engine.state.optimizers import members_of
from unisono.errors import CheckpointError
from unisono.runtime.device import bytes_of, is_on_host, on_host
from unisono.runtime.held import fill
from unisono.runtime.reach import MISSING, Holder, attributes_of, reach

KEY = "unisono.attributes"
"""Where they are in a run's state, under a name that no program takes."""

_PLAIN = {type(None), bool, int, float, str}
_SEQUENCES, _TABLES = {list, tuple, deque, set}, {dict, OrderedDict, Counter, defaultdict}
_OF = ": "  # between the way to what holds a value and its name
_KEPT_ELSEWHERE = frozenset({"state", "param_groups", "defaults"})  # of an optimizer
_OF_MODULES = frozenset(vars(nn.Module()))  # modes are kept elsewhere, hooks belong to libraries
_ENTRIES, _COLUMNS, _BYTES = 4096, 16, 1 << 20  # at most, where data may lie, too
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPTIMIZER, _MODULE = "the optimizer", "unisono.module"


def own_optimizers(optimizer: Optimizer) -> dict[str, Any]:
    """Give those of a run's optimizers that are not torch's own, by name."""
    return {
        f"{_OPTIMIZER} {name}".rstrip(): member
        for name, member in members_of(optimizer).items()
        if not type(member).__module__.startswith("torch.")
    }


class _Table(NamedTuple):
    """Something that holds values by name."""

    holder: Holder
    is_open: bool  # anything may be there, of any size, such as a dataset

    def values(self) -> dict[str, Any]:
        return {name[1:]: value for name, value in self.holder.read()}

    def set(self, key: str, value: Any) -> None:
        assert self.holder.put is not None
        self.holder.put(f".{key}", value)


class _Taken(NamedTuple):
    """A value, taken apart."""

    packed: Any  # plain JSON
    tensors: dict[str, torch.Tensor]

    @property
    def text(self) -> str:
        """Tell its plain values, -0.0 from 0.0 and 1 from True."""
        return json.dumps(self.packed)

    def is_like(self, other: _Taken) -> bool:
        """Whether both have the same bits."""
        both = (self.packed, other.packed)
        if all(isinstance(one, list) for one in both) and len(both[0]) != len(both[1]):
            return False  # to write long ones as text takes long
        return self.text == other.text and all(
            one.dtype == there.dtype
            and one.shape == there.shape
            and torch.equal(one.view(_BITS[one.itemsize]), there.view(_BITS[one.itemsize]))
            for one, there in zip(self.tensors.values(), other.tensors.values(), strict=True)
        )

    def copied(self) -> _Taken:
        """Give the same with tensors that do not change."""
        return self._replace(tensors={name: one.clone() for name, one in self.tensors.items()})

    def value(self) -> Any:
        """Put it together."""
        take = self.tensors.__getitem__
        return packing.unpack({"": self.packed}, lambda label: take(label).clone(), KEY)[""]

    def number(self) -> int:
        """Hash it; 32 bits."""
        number = zlib.crc32(self.text.encode())
        for one in self.tensors.values():
            number = zlib.crc32(bytes_of(on_host(one).contiguous()), number)
        return number


class Attributes:
    """The attributes of some objects, as an object with a state. Final.

    Each is named by the way to what holds it and by its name: ``"Meter.steps: count"``. Tensors of
    `model` and `optimizer` are kept elsewhere.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._roots: dict[str, Any] = {}
        self._tables: dict[str, _Table] = {}
        self._known: set[str] = set()  # all that was there before the first `on_begin`
        self._before: dict[str, _Taken] = {}  # what could be kept of it
        self._after: dict[str, _Taken] = {}  # `on_begin` of the loop under way
        self._loop = 0  # whose `on_begin` was called last
        self._loaded: Mapping[str, Any] | None = None  # before it was
        self._own: set[str] = set()  # what differs from rank to rank

    def watch(self, roots: Mapping[str, Any]) -> None:
        """Note what all that some objects lead to is like, before anything is put back."""
        self._after, self._roots = {}, dict(roots)
        there = self._tables
        new = {
            path: table
            for path, table in self._found().items()
            if path not in there or there[path].holder.held is not table.holder.held
        }
        there |= new
        self._known |= {way for way, _, _ in _ways(new)}
        self._before |= {way: one.copied() for way, one in self._taken(new).items()}

    def has_begun(self, loop: int, tell: Callable[[bytes], Mapping[int, bytes]] | None) -> None:
        """Put back what `on_begin` has set anew, where the loop of this number had begun before.

        `tell` tells all workers something, and hears them; None: this one has joined the others.
        """
        self._tables = self._found() | self._tables  # some are made there
        if tell is not None:
            self._find_own(tell)
        if self._loaded is not None and self._loaded["loop"] == loop:
            self._apply(self._loaded)
        self._loaded, self._loop = None, loop
        self._after = {way: one.copied() for way, one in self._taken().items()}

    def state_dict(self) -> dict[str, Any]:
        """Give what is held, and has changed since the first loop began."""
        before, now = self._before, self._taken()
        there = {way: value for way, _, value in _ways(self._tables)}
        changed = sorted(
            way for way, one in now.items() if way not in before or not one.is_like(before[way])
        )
        return {
            "loop": self._loop,
            "values": {way: _plain(there[way]) for way in changed},
            "rest": sorted((there.keys() - self._known | before.keys()) - now.keys()),
            "own": sorted(self._own),
            "moved": [
                way for way in changed if not all(map(is_on_host, now[way].tensors.values()))
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the objects what they had; those that came later stay as they are."""
        try:
            if not self._after:
                self._loaded = copy.deepcopy(state)  # `on_begin` may change what is put back
                self._apply(state)
            elif state["loop"] == self._loop:
                self._forget_others({*state["values"], *state["rest"]})
                self._apply(state)
            else:  # from before `on_begin`, which is not called again
                self._forget_others({*self._after})
                for way, one in self._after.items():
                    self._put(way, one.value())
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the attributes of callbacks and optimizers in `run.state` must be as they were "
                f"saved, but {error!r} came of reading them: resume from another checkpoint."
            ) from error

    def hand_out(self, state: Mapping[str, Any]) -> None:
        """Give optimizers what those had that updated for all, at a loop's end."""
        self._apply(state, of=_OPTIMIZER)

    def _apply(self, state: Mapping[str, Any], of: str = "") -> None:
        """Put back what a state has; `of`: what begins so alone."""
        device = next(self._model.parameters()).device
        self._own.update(state["own"])
        values = dict(state["values"])
        for way, one in self._before.items():
            if way not in values and way not in state["rest"]:
                values[way] = one.value()
        for way, value in values.items():
            if way.startswith(of) and way not in self._own:
                self._put(way, moved(value, device) if way in state["moved"] else value)

    def _put(self, way: str, value: Any) -> None:
        path, _, key = way.rpartition(_OF)
        if path in self._tables:
            _put(self._tables[path], key, value)

    def _forget_others(self, ways: set[str]) -> None:
        """Delete what objects have come to have since."""
        for way in self._taken().keys() - ways - self._known:
            with suppress(Exception):  # a closure has all of its names from the beginning
                path, _, key = way.rpartition(_OF)
                self._tables[path].set(key, MISSING)

    def _find_own(self, tell: Callable[[bytes], Mapping[int, bytes]]) -> None:
        """Find what differs from rank to rank from the beginning. Collective."""
        mine = {way: one.number() for way, one in self._taken().items()}
        for message in tell(json.dumps(mine).encode()).values():
            there = json.loads(message)
            self._own |= {way for way in mine | there if mine.get(way) != there.get(way)}

    def _taken(self, tables: Mapping[str, _Table] | None = None) -> dict[str, _Taken]:
        """Take apart what can be kept of what is held; by some, or by all."""
        elsewhere = functools.cache(self._storages)  # few have tensors
        found: dict[str, _Taken] = {}
        for way, table, value in _ways(self._tables if tables is None else tables):
            if way in self._own or (table.is_open and not _is_small(value)):
                continue
            with suppress(CheckpointError, RecursionError):
                if _can_be_kept(value, elsewhere):
                    tensors: dict[str, torch.Tensor] = {}
                    keep = packing.keep_in(tensors, str)
                    found[way] = _Taken(packing.pack(_plain(value), way, keep, str), tensors)
        return found

    def _storages(self) -> set[int]:
        """Give the memory of what is kept elsewhere, which must not be copied or written to."""
        states = states_here(self._optimizer)
        inner = (value for state in states if isinstance(state, dict) for value in state.values())
        all_of = (*self._model.parameters(), *self._model.buffers(), *inner)
        return {_storage(one) for one in all_of if isinstance(one, torch.Tensor)} - {0}

    def _found(self) -> dict[str, _Table]:
        """Find what holds values now, by the way to it."""
        layers = {id(vars(module)) for module in self._model.modules()}
        holders = [one for one in reach(self._roots).holders if one.put is not None]
        datasets = {
            id(vars(value))
            for one in holders
            for _, value in one.read()
            if isinstance(value, Dataset) and hasattr(value, "__dict__")
        }
        found: dict[str, _Table] = {}
        for one in holders:
            if one.kind == "entries" or id(one.held) in layers:
                continue  # what is in a container is kept with it
            is_open = one.kind == "names" or id(one.held) in datasets
            name = one.path
            while name in found:  # a function has a closure, and globals that it names
                name += "'"
            found[name] = _Table(one, is_open)
        for name, module in self._model.named_modules():
            if (layer := attributes_of(f"the model {name}", module)) is not None:
                found[layer.path] = _Table(layer, is_open=True)
        return found


def _ways(tables: Mapping[str, _Table]) -> Iterator[tuple[str, _Table, Any]]:
    """Give each value with its name, but those that are kept elsewhere."""
    for path, table in tables.items():
        values = table.values()
        others = _KEPT_ELSEWHERE
        if values.keys() >= {"_parameters", "_modules"}:
            others |= _OF_MODULES
        for key, value in values.items():
            if key not in others and key[:2] != "__":
                yield f"{path}{_OF}{key}", table, value


def _is_small(value: Any) -> bool:
    """Tell whether it may be kept wherever it is found."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes <= _BYTES
    kind = type(value)
    if kind in _SEQUENCES or kind in _TABLES:
        parts = value.values() if kind in _TABLES else value
        return len(value) <= _ENTRIES and all(map(_is_row, parts))
    return True


def _is_row(value: Any) -> bool:
    """Tell whether it is plain, or a tuple or list of a few plain values."""
    if type(value) in (tuple, list):
        return len(value) <= _COLUMNS and {*map(type, value)} <= _PLAIN
    return type(value) in _PLAIN


def _plain(value: Any) -> Any:
    """Give what is kept of a value: of a module, its parameters and buffers."""
    if not isinstance(value, nn.Module):
        return value
    named = (*value.named_parameters(), *value.named_buffers())
    return {_MODULE: {name: tensor.detach() for name, tensor in named}}


def _can_be_kept(value: Any, elsewhere: Callable[[], set[int]]) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind in _SEQUENCES:
        kinds = {*map(type, value)}
        return kinds <= _PLAIN or all(_can_be_kept(item, elsewhere) for item in value)
    if kind in _TABLES:
        return all(_can_be_kept(item, elsewhere) for item in value.values())
    if kind is torch.Tensor:
        return value.layout is torch.strided and _storage(value) not in elsewhere()
    if isinstance(value, nn.Module):
        return not {*map(_storage, _plain(value)[_MODULE].values())} & elsewhere()
    return kind is np.ndarray or isinstance(value, np.generic)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _put(table: _Table, key: str, value: Any) -> None:
    """Set a value; in the same container, tensor, array or module where there is one already."""
    now: Any = table.values().get(key)
    if isinstance(value, dict) and value.keys() == {_MODULE}:
        if isinstance(now, nn.Module):  # else the program has not made it yet
            for name, tensor in _plain(now)[_MODULE].items():
                tensor.copy_(value[_MODULE][name])
    elif not fill(now, value):
        table.set(key, value)

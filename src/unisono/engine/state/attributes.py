"""What a program keeps in attributes of its own callbacks and optimizers, as a part of its run.

::

    a loop begins    watch ─► before                    what the program has made of them
    on_begin         has_begun                          what differs from rank to rank stays there
    a snapshot       state_dict ─► values, same, rest   what differs from before; what does not
    back, resumed    load_state_dict

Plain values, tensors and arrays are kept, also in lists, tuples, sets and dicts, and in attributes
of the program's own objects that are attributes. Whatever else there is stays as it is.
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
from unisono.engine.state.optimizer_state import moved
from unisono.engine.state.optimizers import members_of
from unisono.errors import CheckpointError
from unisono.runtime.device import bytes_of, is_on_host, on_host
from unisono.runtime.reach import is_of_a_library

KEY = "unisono.attributes"
"""Where they are in a run's state, under a name that no program takes."""

_PLAIN = {type(None), bool, int, float, str}
_SEQUENCES, _TABLES = {list, tuple, deque, set}, {dict, OrderedDict, Counter, defaultdict}
_KEPT_ELSEWHERE = {"state", "param_groups", "defaults"}  # of an optimizer
_NOT_WALKED = (nn.Module, Optimizer, Dataset, type)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPTIMIZER = "the optimizer"
_DEPTH = 3  # objects within objects


def own_optimizers(optimizer: Optimizer) -> dict[str, Any]:
    """Give those of a run's optimizers that are not torch's own, by name."""
    return {
        f"{_OPTIMIZER} {name}".rstrip(): member
        for name, member in members_of(optimizer).items()
        if not type(member).__module__.startswith("torch.")
    }


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

    Args:
        model, optimizer: whose tensors are kept elsewhere.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._objects: dict[str, Any] = {}
        self._before: dict[str, dict[str, _Taken]] = {}
        self._after: dict[str, dict[str, _Taken]] = {}  # `on_begin` of the loop under way
        self._loop = 0  # whose `on_begin` was called last
        self._loaded: Mapping[str, Any] | None = None  # before it was
        self._own: set[tuple[str, str]] = set()  # what differs from rank to rank

    def watch(self, objects: Mapping[str, Any]) -> None:
        """Note what objects are like before a loop, and before anything is put back."""
        self._after = {}
        for name, thing in self._with_parts(objects, _DEPTH, set()):
            if self._objects.get(name) is not thing:
                self._objects[name] = thing
                taken = self._taken(name)
                self._before[name] = {key: one.copied() for key, one in taken.items()}

    def has_begun(self, loop: int, tell: Callable[[bytes], Mapping[int, bytes]] | None) -> None:
        """Put back again what `on_begin` has set anew, where the loop had begun before.

        Args:
            loop: its number.
            tell: tells all workers something, and hears them; None: this one has joined the others.
        """
        for name, thing in self._with_parts(dict(self._objects), 1, set()):
            if name not in self._objects:  # made there
                self._objects[name], self._before[name] = thing, {}
        if tell is not None:
            self._find_own(tell)
        if self._loaded is not None and self._loaded["loop"] == loop:
            self._apply(self._loaded)
        self._loaded, self._loop = None, loop
        self._after = {
            name: {key: one.copied() for key, one in self._taken(name).items()}
            for name in self._objects
        }

    def state_dict(self) -> dict[str, Any]:
        """Give what the objects have, and has changed since the first loop began."""
        objects = {}
        for name, thing in self._objects.items():
            before, now = self._before[name], self._taken(name)
            same = [key for key, one in now.items() if key in before and one.is_like(before[key])]
            changed = now.keys() - {*same}
            objects[name] = {
                "values": {key: vars(thing)[key] for key in sorted(changed)},
                "same": same,
                "own": sorted(key for owner, key in self._own if owner == name),
                "rest": [key for key in vars(thing) if key not in now],
                "moved": [key for key in sorted(changed) if not _on_host(now[key])],
            }
        return {"loop": self._loop, "objects": objects}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the objects what they had; those that came later stay as they are.

        Raises:
            CheckpointError: the state is not of the form that :meth:`state_dict` gives.
        """
        try:
            self._load(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the attributes of callbacks and optimizers in `run.state` must be as they were "
                f"saved, but {error!r} came of reading them: resume from another checkpoint."
            ) from error

    def _load(self, state: Mapping[str, Any]) -> None:
        if not self._after:
            self._loaded = copy.deepcopy(state)  # `on_begin` may change what is put back
            self._apply(state)
        elif state["loop"] == self._loop:
            self._apply(state, is_back=True)
        else:  # from before `on_begin`, which is not called again
            for name, taken in self._after.items():
                self._forget_others(name, taken)
                for key, one in taken.items():
                    _put(self._objects[name], key, one.value())

    def hand_out(self, state: Mapping[str, Any]) -> None:
        """Give optimizers what those had that updated for all, at a loop's end."""
        objects = state["objects"].items()
        of = {name: said for name, said in objects if name.startswith(_OPTIMIZER)}
        self._apply({"objects": of})

    def _apply(self, state: Mapping[str, Any], *, is_back: bool = False) -> None:
        device = next(self._model.parameters()).device
        for name, said in state["objects"].items():
            thing = self._objects.get(name)
            if thing is None:
                continue
            self._own.update((name, key) for key in said["own"])
            if is_back:
                self._forget_others(name, (*said["values"], *said["same"], *said["rest"]))
            for key in said["same"]:
                if key in self._before[name] and (name, key) not in self._own:
                    _put(thing, key, self._before[name][key].value())
            for key, value in said["values"].items():
                if (name, key) not in self._own:
                    is_moved = key in said["moved"]
                    _put(thing, key, moved(value, device) if is_moved else value)

    def _forget_others(self, name: str, keys: Any) -> None:
        """Delete what an object has come to have since."""
        for key in self._taken(name).keys() - {*keys, *self._before[name]}:
            del vars(self._objects[name])[key]

    def _find_own(self, tell: Callable[[bytes], Mapping[int, bytes]]) -> None:
        """Find what differs from rank to rank from the beginning. Collective."""
        numbers = {
            name: {key: one.number() for key, one in self._taken(name).items()}
            for name in self._objects
        }
        for message in tell(json.dumps(numbers).encode()).values():
            there = json.loads(message)
            for name, mine in numbers.items():
                other = there.get(name, {})
                self._own |= {(name, key) for key in mine if other.get(key) != mine[key]}
                self._own |= {(name, key) for key in other.keys() - mine.keys()}

    def _taken(self, name: str) -> dict[str, _Taken]:
        """Take apart what can be kept of an object."""
        elsewhere = functools.cache(self._storages)  # few have tensors
        found: dict[str, _Taken] = {}
        for key, value in vars(self._objects[name]).items():
            if key in _KEPT_ELSEWHERE or (name, key) in self._own:
                continue
            with suppress(CheckpointError, RecursionError):
                if _can_be_kept(value, elsewhere):
                    tensors: dict[str, torch.Tensor] = {}
                    keep = packing.keep_in(tensors, str)
                    packed = packing.pack(value, key, keep, str)
                    found[key] = _Taken(packed, tensors)
        return found

    def _storages(self) -> set[int]:
        """Give the memory of what is kept elsewhere, which must not be copied or written to."""
        states = self._optimizer.state.values()
        inner = (value for state in states if isinstance(state, dict) for value in state.values())
        all_of = (*self._model.parameters(), *self._model.buffers(), *inner)
        return {_storage(one) for one in all_of if isinstance(one, torch.Tensor)} - {0}

    def _with_parts(
        self, objects: Mapping[str, Any], depth: int, seen: set[int]
    ) -> Iterator[tuple[str, Any]]:
        """Give objects, and those of the program's own classes that are their attributes."""
        for name, thing in objects.items():
            if hasattr(thing, "__dict__") and id(thing) not in seen:
                seen.add(id(thing))
                yield name, thing
                if depth:
                    parts = {
                        f"{name}.{key}": value
                        for key, value in vars(thing).items()
                        if not isinstance(value, _NOT_WALKED)
                        and not is_of_a_library(type(value).__module__)
                    }
                    yield from self._with_parts(parts, depth - 1, seen)


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
    return kind is np.ndarray or isinstance(value, np.generic)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _on_host(taken: _Taken) -> bool:
    return all(map(is_on_host, taken.tensors.values()))


def _put(thing: Any, key: str, value: Any) -> None:
    """Set an attribute; the same list, dict, tensor or array where there is one already."""
    now = vars(thing).get(key)
    if isinstance(now, list) and isinstance(value, list):
        now[:] = value
    elif isinstance(now, dict) and isinstance(value, dict):
        now.clear()
        now.update(value)
    elif _are_alike(now, value, torch.Tensor):
        now.detach().copy_(value)
    elif _are_alike(now, value, np.ndarray) and now.flags.writeable:
        now[...] = value
    else:
        vars(thing)[key] = value


def _are_alike(now: Any, value: Any, kind: type) -> bool:
    both = isinstance(now, kind) and isinstance(value, kind)
    return both and (now.shape, now.dtype) == (value.shape, value.dtype)

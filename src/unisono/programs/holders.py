"""Where a program stores values: the kinds of places, how each is read, and how it is restored.

::

    attributes, slots      of an object             cells      of a closure
    entries, items, …      of a container           names      of a class, a module or a frame
    contents               of a tensor, an array    frozen     of an iterator, a suspended generator

A *holder* is one such place. Its content is a pair of tuples, names and values. Reading it runs no
code of the program: attributes are read directly, and properties are not called. Other objects (a
file, a lock, an object of C) have no visible content.
"""

from __future__ import annotations

import array
import ast
import ctypes
import functools
import gc
import hashlib
import operator
import os
import pickle
import random
import re
import struct
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from unisono.programs.arrays import bits, elements
from unisono.programs.frames import KeptFrame
from unisono.programs.hashes import hashed
from unisono.programs.iterators import parts_of
from unisono.programs.settings import PLAIN, is_plain, put_settings, read_settings

Content = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Names, and the value of each."""

ARRAYS = (torch.Tensor, np.ndarray)
ANY = "*"
"""Among the names of a module: all of them count, as its code computes some."""
_WHOLE = 1 << 20
"""Larger tensors and arrays, in bytes, are only sampled."""
_LONG = 1 << 16
"""Containers with more entries are only sampled."""
_SAMPLED = 64
_CONTAINERS = (OrderedDict, dict, list, deque, set)
BASES = (OrderedDict, Counter, defaultdict, dict, list, deque, set)
"""Classes of containers that determine the contents of their subclasses' objects."""
_IS_HEAP = 1 << 9  # one of a class's flags
_POINTER = struct.calcsize("P")


class Kind(NamedTuple):
    """How places of one kind are read and restored.

    `put` is None if they cannot be restored; `opaque` describes what of an owner cannot be carried.
    """

    name: str
    read: Callable[[Any, Any], Content]
    put: Callable[[Any, Any, Content], object] | None = None
    opaque: Callable[[Any], str] | None = None


class Holder(NamedTuple):
    """One place: its path, its kind, the object with the values, and which names count."""

    path: str
    kind: Kind
    owner: Any
    names: Collection[str] | None = None
    is_of_library: bool = False
    key: str = ""  # the same in every process, and unique

    def read(self) -> Content:
        """Return the current content."""
        return self.kind.read(self.owner, self.names)

    def put(self, content: Content) -> None:
        """Restore a content; does nothing where that is impossible."""
        if self.kind.put is not None:
            self.kind.put(self.owner, self.names, content)

    @property
    def can_be_put_back(self) -> bool:
        """Whether the place can be restored; tensors are copied for this."""
        return self.kind.put is not None or self.kind is CONTENTS

    @property
    def can_go_back_and_forth(self) -> bool:
        """Whether the place can be restored to an earlier content, and then to its content now.

        Tables have no values, caches are cleared, and variables of a context cannot be unset.
        """
        if self.kind is ELEMENTS:  # a set may come to another order
            return [*self.owner] == [*{*self.owner.copy()}]
        return self.can_be_put_back and self.kind not in (TABLE, CACHE, CONTEXT)

    def slot(self, name: Any) -> str:
        """Return the path to one of the values."""
        if self.kind in (ENTRIES, ITEMS, OBJECTS, FROZEN):
            return f"{self.path}[{name!r:.40}]"
        if isinstance(self.names, Mapping):
            return str(self.names.get(name, f"{self.path}.{name}"))
        return self.path if self.kind in _WHOLES else f"{self.path}.{name}".lstrip(".")

    @property
    def identity(self) -> tuple[int, str]:
        """The identity of the place in this process, whatever path leads to it."""
        return id(self.owner), self.kind.name

    def shown(self, name: Any) -> str:
        """Return the path as a program would write it, without torch's tables of layers."""
        is_whole = self.kind is FROZEN or (self.kind is ENTRIES and type(name) is not str)
        return _LAYERS.sub(r".\1", self.path if is_whole else self.slot(name))


def same(one: Content, other: Content) -> bool:
    """Return whether two contents are the same objects, or plain values with the same bits."""
    (names, values), (others, there) = one, other
    if len(values) != len(there):
        return False
    try:
        if names is not others and names != others:
            return False
    except Exception:  # of keys: two tensors have no single answer
        return False
    return all(map(operator.is_, values, there)) or all(map(_is_same, values, there))


def changed_slots(then: Content, now: Content) -> list[Any]:
    """Return the names whose values differ, including those added or removed."""
    before, after = dict(numbered(then)), dict(numbered(now))
    changed = [
        name
        for name in {**before, **after}
        if name not in before or name not in after or not _is_same(before[name], after[name])
    ]
    return changed or [one for one, other in zip(then[0], now[0], strict=True) if one != other]


def numbered(content: Content) -> Iterable[tuple[Any, Any]]:
    """Return the names of a content's values, or their indices, with each value."""
    names, values = content
    return zip(names, values, strict=True) if names else enumerate(values)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float or kind is complex:
        return repr(one) == repr(other)  # -0.0 differs from 0.0, and NaN equals NaN
    if isinstance(one, np.generic) and not one.dtype.hasobject:
        return bool(one.dtype == other.dtype and bits(np.asarray(one)) == bits(np.asarray(other)))
    if kind is tuple:
        return len(one) == len(other) and all(map(_is_same, one, other))
    if kind is frozenset:
        if {*map(id, one)} == {*map(id, other)}:
            return True
        return {*map(_element, one)} == {*map(_element, other)}
    return (kind in PLAIN or kind in (range, slice)) and bool(one == other)


def _element(value: Any) -> tuple[type, Any]:
    """Return what identifies an element of a set, without running its own `__eq__`."""
    return type(value), repr(value) if type(value) in PLAIN else id(value)


# Objects, closures and namespaces


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes; None if it has none."""
    read = threading.local if isinstance(value, threading.local) else object
    try:
        attributes = read.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def _read_attributes(owner: Any, without: Collection[str] | None) -> Content:
    table = attributes_of(owner) or {}
    if without:
        table = {name: value for name, value in table.items() if name not in without}
    return (*table, "__class__"), (*table.values(), type(owner))


def _put_attributes(owner: Any, without: Collection[str] | None, content: Content) -> None:
    table, wanted = attributes_of(owner), dict(zip(*content, strict=True))
    kind = wanted.pop("__class__")
    if kind is not type(owner):
        object.__setattr__(owner, "__class__", kind)
    if isinstance(owner, torch.nn.Module):
        for name in (*owner._parameters, *owner._buffers):
            wanted.pop(name, None)  # pruning computes an attribute, which would hide it
    if table is not None:
        for name in [name for name in table if name not in wanted and name not in (without or ())]:
            del table[name]
        table.update(wanted)


def _read_named(owner: Any, names: Any) -> Content:
    """Read the plain attributes of a library's object that the program's code names."""
    there = {n: v for n, v in (attributes_of(owner) or {}).items() if n in names}
    there = {name: value for name, value in there.items() if type(value) in PLAIN}
    return tuple(there), tuple(there.values())


def _put_named(owner: Any, names: Any, content: Content) -> None:
    there, (now, _) = attributes_of(owner), _read_named(owner, names)
    for name, value in zip(*content, strict=True):
        if there is not None and name in now:  # a file could contain others
            there[name] = value


@functools.lru_cache(maxsize=1024)
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of a class's slots."""
    return tuple(
        name
        for each in kind.__mro__
        if "__slots__" in vars(each) or each is defaultdict  # its factory
        for name, slot in vars(each).items()
        if isinstance(slot, types.MemberDescriptorType)
    )


def _read_filled(names: Iterable[str], get: Callable[[str], Any]) -> Content:
    found = {}
    for name in names:
        with suppress(AttributeError, ValueError):  # a slot or a cell that is still empty
            found[name] = get(name)
    return tuple(found), tuple(found.values())


def _read_slots(owner: Any, names: Any) -> Content:
    return _read_filled(names, functools.partial(object.__getattribute__, owner))


def _put_slots(owner: Any, names: Any, content: Content) -> None:
    for name, value in zip(*content, strict=True):
        object.__setattr__(owner, name, value)
    for name in {*_read_slots(owner, names or ())[0]} - {*content[0]}:
        object.__delattr__(owner, name)


def _cells(owner: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))


def _read_cells(owner: Any, _: Any) -> Content:
    cells = _cells(owner)
    return _read_filled(cells, lambda name: cells[name].cell_contents)


def _put_cells(owner: Any, _: Any, content: Content) -> None:
    cells, wanted = _cells(owner), dict(zip(*content, strict=True))
    for name, cell in cells.items():
        if name in wanted:
            cell.cell_contents = wanted[name]
        else:
            with suppress(ValueError):  # empty already
                del cell.cell_contents


def _space(owner: Any) -> Any:
    return vars(owner) if isinstance(owner, (type, types.ModuleType)) else owner


_OF_TYPES = ("__bases__", "__name__", "__qualname__")  # not in the namespace of a class


def _read_names(owner: Any, names: Any) -> Content:
    space = _space(owner)
    if isinstance(owner, type):  # all of them: an inherited name may be set here later
        computed = {name: getattr(owner, name) for name in _OF_TYPES if name in names}
        space = {**space, **computed}
        names = [name for name in space if name[:2] != "__" or name in names]
    elif ANY in names:
        mine = [name for name in space if name[:2] != "__" or name in names]
        names = [name for name in mine if names.get(name) != ""]
    there = [name for name in names if name in space]
    return tuple(there), tuple(space[name] for name in there)


def _put_names(owner: Any, names: Any, content: Content) -> None:
    now, wanted = _read_names(owner, names), dict(zip(*content, strict=True))
    for name in changed_slots(content, now):
        if name not in wanted:
            (delattr if isinstance(owner, type) else _delete)(owner, name)
        elif isinstance(owner, type):
            setattr(owner, name, wanted[name])
        else:
            _space(owner)[name] = wanted[name]


def _read_patched(owner: Any, names: Any) -> Content:
    """Read a library's module or class by the names that the program's code uses."""
    space = vars(owner)
    there = [name for name in names if name in space]
    return tuple(there), tuple(space[name] for name in there)


def _put_patched(owner: Any, names: Any, content: Content) -> None:
    now, wanted = _read_patched(owner, names), dict(zip(*content, strict=True))
    for name in changed_slots(content, now):
        if name in wanted and name in names:  # a file could contain others
            setattr(owner, name, wanted[name])


def _read_added(owner: Any, names: Any) -> Content:
    names, values = _read_patched(owner, names)
    # A module of a package may have been imported.
    there = {
        n: v for n, v in zip(names, values, strict=True) if not isinstance(v, types.ModuleType)
    }
    return tuple(there), tuple(there.values())


def _put_added(owner: Any, names: Any, content: Content) -> None:
    _put_patched(owner, names, content)
    for name in _read_added(owner, names)[0]:
        if name not in content[0]:
            delattr(owner, name)


def _read_computed(owner: Any, names: Any) -> Content:
    """Read attributes of a library's object, without those that are created at each reading."""
    found = {}
    for name in names:
        with suppress(Exception):
            value = getattr(owner, name)
            if is_plain(value) or getattr(owner, name) is value:
                found[name] = value
    return tuple(found), tuple(found.values())


def _put_computed(owner: Any, names: Any, content: Content) -> None:
    now, wanted = _read_computed(owner, names), dict(zip(*content, strict=True))
    for name in changed_slots(content, now):
        if name in wanted and name in names:  # a file could contain others
            setattr(owner, name, wanted[name])
        elif name in names:
            delattr(owner, name)


_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_MORE_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__", "__module__")


def _read_function(owner: Any, names: Any) -> Content:
    more = (name for name in _MORE_OF_FUNCTIONS if name in names)
    return _read_slots(owner, (*_OF_FUNCTIONS, *more))


def _put_function(owner: Any, _: Any, content: Content) -> None:
    for name, value in zip(*content, strict=True):
        setattr(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    del _space(owner)[name]


def _read_frame(owner: KeptFrame, names: Any) -> Content:
    return _read_names(owner.f_locals, names)


def _put_frame(owner: KeptFrame, names: Any, content: Content) -> None:
    """Set variables of a running function (PEP 667; before Python 3.13, through the C API)."""
    variables = owner.f_locals
    variables.update(dict(zip(*content, strict=True)))
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(owner), ctypes.c_int(0))


# Containers


def _base(owner: Any) -> Any:
    """Return the builtin class whose methods read and write a container, even of a subclass."""
    kind = type(owner)
    if kind in _CONTAINERS:
        return kind
    return next(each for each in _CONTAINERS if isinstance(owner, each))


def _is_ours(value: Any) -> bool:
    """Return whether a value is one of our hooks, which are added and removed separately."""
    module = getattr(getattr(value, "func", value), "__module__", None)
    return isinstance(module, str) and module.startswith("unisono.") and callable(value)


def _read_entries(owner: Any, _: Any) -> Content:
    kind = _base(owner)
    if (size := kind.__len__(owner)) > _LONG:
        return (), (size,)
    names, values = tuple(kind.keys(owner)), tuple(kind.values(owner))
    return names, values


def _put_entries(owner: Any, _: Any, content: Content) -> None:
    kind, (names, values) = _base(owner), content
    if len(names) != len(values):
        return
    ours = {name: each for name, each in kind.items(owner) if _is_ours(each)}
    wanted = {**dict(zip(names, values, strict=True)), **ours}
    kind.clear(owner)
    kind.update(owner, wanted)


def _read_items(owner: Any, _: Any) -> Content:
    kind = _base(owner)
    if (size := kind.__len__(owner)) <= _LONG:
        return (), tuple(kind.__iter__(owner))
    step = size // _SAMPLED
    return (), (size, *(kind.__getitem__(owner, at * step) for at in range(_SAMPLED)))


def _put_items(owner: Any, _: Any, content: Content) -> None:
    kind = _base(owner)
    if kind.__len__(owner) <= _LONG:
        kind.clear(owner)
        kind.extend(owner, content[1])


def _read_objects(owner: Any, _: Any) -> Content:
    flat = elements(owner).reshape(-1)
    if owner.size <= _LONG:
        return (), tuple(flat.tolist())
    return (), (owner.size, *flat[:: owner.size // _SAMPLED].tolist())


def _put_objects(owner: Any, _: Any, content: Content) -> None:
    if owner.size <= _LONG:
        for at, value in enumerate(content[1]):
            elements(owner).flat[at] = value


def _read_elements(owner: Any, _: Any) -> Content:
    return (), (frozenset(owner) if len(owner) <= _LONG else len(owner),)


def _put_elements(owner: Any, _: Any, content: Content) -> None:
    if isinstance(content[1][0], frozenset):
        set.clear(owner)
        set.update(owner, content[1][0])


def _read_table(owner: Any, names: Any) -> Content:
    tables = vars(owner)
    found = tuple([f"{table}.{name}" for table in names for name in tables[table]])
    return found, found


def _put_table(owner: Any, names: Any, content: Content) -> None:
    """Make a layer's tables have these names; entries that exist keep their values."""
    tables = vars(owner)
    for name in set(_read_table(owner, names)[0]) - set(content[0]):
        table, _, key = name.partition(".")
        del tables[table][key]
    for name, value in zip(*content, strict=True):
        table, _, key = name.partition(".")
        there = tables[table].pop(key, None)  # to the end, as its order counts
        tables[table][key] = there if type(value) is str else value


def _read_hooks(owner: Any, names: Any) -> Content:
    tables = vars(owner)
    return names, tuple([_hooks_in(tables[name]) if tables[name] else () for name in names])


def _hooks_in(hooks: Any) -> tuple[Any, ...]:
    if not isinstance(hooks, dict):
        return (hooks,)
    return tuple(pair for pair in hooks.items() if not _is_ours(pair[1]))


def _put_hooks(owner: Any, names: Any, content: Content) -> None:
    for name, hooks in zip(*content, strict=True):
        if isinstance(vars(owner)[name], dict):
            keys, values = tuple(key for key, _ in hooks), tuple(value for _, value in hooks)
            _put_entries(vars(owner)[name], None, (keys, values))


GRADIENT = ("grad",)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _read_tensor(owner: Any, names: Any) -> Content:
    """Read the attributes and hooks of a tensor, and its gradient by name, but not its elements."""
    hooks = tuple(_hooks_in(getattr(owner, name) or {}) for name in _TENSOR_HOOKS)
    table, more = vars(owner), names if names and owner.is_leaf else ()
    values = (*table.values(), *hooks, *(getattr(owner, name) for name in more))
    return (*table, *_TENSOR_HOOKS, *more), values


def put_tensor(owner: Any, names: Any, content: Content) -> None:
    """Set the attributes and hooks of a tensor."""
    wanted, table = dict(zip(*content, strict=True)), vars(owner)
    for name in [name for name in names or () if name in wanted]:
        setattr(owner, name, wanted.pop(name))
    for name in _TENSOR_HOOKS:
        hooks = wanted.pop(name)
        if hooks and not getattr(owner, name):
            setattr(owner, name, OrderedDict())
        if getattr(owner, name) is not None:
            keys, values = tuple(key for key, _ in hooks), tuple(value for _, value in hooks)
            _put_entries(getattr(owner, name), None, (keys, values))
    table.clear()
    table.update(wanted)


# What is one value


def _read_context(owner: Any, _: Any) -> Content:
    try:
        return (), (owner.get(),)
    except LookupError:
        return (), ()


def _put_context(owner: Any, _: Any, content: Content) -> None:
    for value in content[1]:
        owner.set(value)
    if not content[1] and _read_context(owner, None)[1]:
        raise RuntimeError(f"{owner.name!r} had no value then, and a ContextVar cannot lose one")


def _put_settings(owner: Any, names: Any, content: Content) -> None:
    now, wanted = read_settings(owner, names), dict(zip(*content, strict=True))
    there = (name for name in changed_slots(content, now) if name in now[0] or name not in owner)
    put_settings(owner, names, wanted, there)


def has_all_names(holder: Holder) -> bool:
    """Return whether all names in a place count, as for classes of the program."""
    is_any = isinstance(holder.owner, type) or ANY in (holder.names or ())
    return holder.kind is NAMES and is_any


HOOKS_OF_MODULES, HOOKS_OF_OPTIMIZERS = (
    {n: v for n, v in vars(of).items() if n.startswith("_global_") and isinstance(v, dict)}
    for of in (torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
)
"""Hooks of all modules, and of all optimizers, by the names of torch's tables."""


# What has no parts: the content is a fingerprint


def _read_contents(owner: Any, _: Any) -> Content:
    # Views share the version of their base, so it counts only if some bytes are not hashed.
    is_dense = isinstance(owner, torch.Tensor) and owner.layout is torch.strided
    has_version = is_dense and owner.nbytes > _WHOLE
    needs = isinstance(owner, torch.Tensor) and owner.is_leaf and owner.requires_grad
    return (), (owner._version if has_version else 0, hashed(owner, _WHOLE), needs)


def _read_bytes(owner: Any, _: Any) -> Content:
    data = bytes(memoryview(owner).cast("B")) if type(owner) is not bytearray else bytes(owner)
    return (), (data if len(data) <= _WHOLE else hashed(data),)


def _put_bytes(owner: Any, _: Any, content: Content) -> None:
    if type(owner) is bytearray:
        owner[:] = content[1][0]
    elif isinstance(owner, array.array):
        del owner[:]
        owner.frombytes(content[1][0])
    elif isinstance(content[1][0], bytes):
        memoryview(owner).cast("B")[:] = content[1][0]


def _read_file(owner: Any, _: Any) -> Content:
    return (), (owner.getvalue(), owner.tell())


def _put_file(owner: Any, _: Any, content: Content) -> None:
    text, position = content[1]
    owner.seek(0)
    owner.truncate()
    owner.write(text)
    owner.seek(position)


def _read_cache(owner: Any, _: Any) -> Content:
    return (), tuple(owner.cache_info())


def _put_cache(owner: Any, _: Any, content: Content) -> None:
    if tuple(owner.cache_info()) != content[1]:
        owner.cache_clear()


def results_of(cached: Any) -> dict[Any, Any] | None:
    """Return what `functools.cache` has stored; None for a cache of limited size."""
    if cached.cache_parameters()["maxsize"] is not None:
        return None
    parts = gc.get_referents(cached)
    return next((one for one in parts if type(one) is dict and one is not vars(cached)), None)


def _read_drawn(owner: Any, _: Any) -> Content:
    return (), (drawn_by(owner), getattr(seeds_of(owner), "n_children_spawned", 0))


def seeds_of(generator: Any) -> Any:
    """Return what one of numpy's generators has its seeds from; None if it has none."""
    seeds = getattr(getattr(generator, "bit_generator", generator), "seed_seq", None)
    return seeds if type(seeds) is np.random.SeedSequence else None


def drawn_by(generator: Any) -> int | str:
    """Return a hash of a random generator's state."""
    if isinstance(generator, random.Random):
        return hash(random.Random.getstate(generator))
    return hashed(state_of(generator))


def state_of(generator: Any) -> Any:
    """Return the state of one of numpy's or torch's random generators."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def _read_position(owner: Any, _: Any) -> Content:
    return (), (os.lseek(owner.fileno(), 0, os.SEEK_CUR),)


SUSPENDABLE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def frame_of(suspended: Any) -> types.FrameType | None:
    """Return the frame of a generator or a coroutine; None if it has ended."""
    names = ("gi_frame", "cr_frame", "ag_frame")
    return next((getattr(suspended, name) for name in names if hasattr(suspended, name)), None)


def gives_steps(suspended: Any) -> bool:
    """Return whether a generator is this package's generator of a loop's steps, or takes those.

    The latter runs whenever the program is looked at, and its variables belong to the loop.
    """
    frame = frame_of(suspended)
    is_ours = frame is not None and str(frame.f_globals.get("__name__")).startswith("unisono.")
    names = ("gi_running", "cr_running", "ag_running")
    return is_ours or any(getattr(suspended, name, False) for name in names)


def _read_suspended(owner: Any, _: Any) -> Content:
    frame = frame_of(owner)
    if frame is None:
        return (), (-1,)
    return ("", *frame.f_locals), (frame.f_lasti, *frame.f_locals.values())


def _words(suspended: Any) -> str:
    return type(suspended).__name__.replace("_", " ")


def _read_autocast(owner: Any, _: Any) -> Content:
    kinds = ("cpu", "cuda")
    return (), tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


def _read_modes(owner: Any, _: Any) -> Content:
    """Read which modes of torch have been entered, without that of its default device."""
    of_functions: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = (*of_functions, *_get_current_dispatch_mode_stack())
    return (), tuple(type(one) for one in modes if not isinstance(one, DeviceContext))


def _read_made_in_c(owner: Any, _: Any) -> Content:
    """Hash the pickle of an object whose contents are not visible otherwise."""
    return (), (hashlib.blake2b(pickle.dumps(owner, 4), digest_size=16).hexdigest(),)


def name_of(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_of_python(kind: type) -> bool:
    """Return whether a class is defined in Python, or otherwise while the process runs."""
    return bool(kind.__flags__ & _IS_HEAP)


@functools.lru_cache(maxsize=1024)
def layout_of(kind: Any) -> Any:
    """Return the builtin class that determines the layout of a class's objects; None if in C."""
    for each in kind.__mro__:
        if each in BASES:
            return each
        if each is object:
            break
        members = vars(each)
        own = ("__dict__" in members) + ("__weakref__" in members)
        slots = members.get("__slots__", ())
        own += 1 if isinstance(slots, str) else len(slots)
        added = each.__basicsize__ - each.__base__.__basicsize__
        is_a_dict = "__dict__" in members and added == _POINTER  # as SimpleNamespace is
        if not (is_of_python(each) or is_a_dict) or added > own * _POINTER:
            return None  # it holds more than attributes and slots
    return object


ATTRIBUTES = Kind("attributes", _read_attributes, _put_attributes)
NAMED = Kind("named attributes", _read_named, _put_named)
"""Of an object that belongs to the process, such as a progress bar."""
SLOTS = Kind("slots", _read_slots, _put_slots)
CELLS = Kind("cells", _read_cells, _put_cells)
NAMES = Kind("names", _read_names, _put_names)
FRAME = Kind("variables", _read_frame, _put_frame)
ENTRIES = Kind("entries", _read_entries, _put_entries)
ITEMS = Kind("items", _read_items, _put_items)
OBJECTS = Kind("objects", _read_objects, _put_objects)
"""Elements of an array of Python objects, of texts of any length, or of records with them."""
ELEMENTS = Kind("elements", _read_elements, _put_elements)
PATCHED = Kind("names of a library", _read_patched, _put_patched)
ADDED = Kind("names set in a library", _read_added, _put_added)
COMPUTED = Kind("attributes of a library", _read_computed, _put_computed)
FUNCTION = Kind("function", _read_function, _put_function)
TENSOR = Kind("tensor", _read_tensor, put_tensor)
"""The attributes and hooks of a tensor."""
CONTEXT = Kind("context", _read_context, _put_context)
SETTINGS = Kind("settings", read_settings, _put_settings)
HOOKS = Kind("hooks", _read_hooks, _put_hooks)
TABLE = Kind("table", _read_table, _put_table)
"""Names of a layer's parameters or buffers, whose values are stored elsewhere."""
CONTENTS = Kind("contents", _read_contents)
BYTES = Kind("bytes", _read_bytes, _put_bytes)
FILE = Kind("file in memory", _read_file, _put_file)
CACHE = Kind("cache", _read_cache, _put_cache)
DRAWN = Kind("generator", _read_drawn)
POSITION = Kind("position", _read_position, opaque=lambda owner: "how far a file has been read")
AUTOCAST = Kind("autocast", _read_autocast, opaque=lambda owner: "what is left open")
MODES = Kind("modes", _read_modes, opaque=lambda owner: "a mode that is left open")
SUSPENDED = Kind("suspended", _read_suspended, opaque=lambda owner: f"a Python {_words(owner)}")
MADE_IN_C = Kind("made in C", _read_made_in_c, opaque=lambda owner: f"a {name_of(type(owner))}")
FROZEN = Kind("frozen", lambda owner, _: ((), parts_of(owner)))
LEAVES = (CONTENTS, BYTES, FILE, DRAWN, POSITION)
"""Kinds of places that lead to no others."""
_WHOLES = {AUTOCAST, MODES, CONTEXT, ELEMENTS, CACHE, SUSPENDED, TABLE, MADE_IN_C, *LEAVES}
_LAYERS = re.compile(r"\._(?:modules|buffers|parameters)\['(\w+)'\]")

VIEWS: dict[Any, Callable[[Any], Any]] = {
    type({}.keys()): dict.keys,
    type({}.values()): dict.values,
    type({}.items()): dict.items,
    types.MappingProxyType: types.MappingProxyType,
}


def viewed(value: Any) -> Any:
    """Return the dict behind one of `VIEWS`."""
    return next(iter(gc.get_referents(value)))


_KEY = "\1"  # before the text of a key that is no text


def name_of_key(key: Any) -> str:
    """Return a key of a dict as a text: itself, or a plain value as Python writes it; else ""."""
    if type(key) is str and not key.startswith(_KEY):
        return key
    if _is_plain(key):
        with suppress(ValueError, SyntaxError):  # not a number, or infinite
            ast.literal_eval(repr(key))
            return _KEY + repr(key)
    return ""


def _is_plain(key: Any) -> bool:
    return type(key) in PLAIN or (type(key) is tuple and all(map(_is_plain, key)))


def key_of_name(name: str) -> Any:
    """Return the key that :func:`name_of_key` has written; raise ValueError for other texts."""
    if not name.startswith(_KEY):
        return name
    try:
        return ast.literal_eval(name[1:])
    except SyntaxError as error:
        raise ValueError(f"{name!r:.40} is no key") from error

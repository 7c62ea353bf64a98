"""What do a program's objects lead to? One walk, from named roots to all places with values.

::

    loss, model, dataset ──► attributes, slots, containers, partials, closures, bound methods,
                             globals and class attributes that the program's own code names ─► …

Nearer things come first. A thing is named by the path to it, ``dataset.transform.steps[2].rng``,
which is the same in every process. The walk skips modules of libraries, and objects that belong to
the process (a library's object with a file, a lock or a thread).
"""

from __future__ import annotations

import argparse
import array
import builtins
import contextvars
import ctypes
import enum
import functools
import gc
import inspect
import io
import logging
import mmap
import queue
import random
import sys
import sysconfig
import threading
import time
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, final

import numpy as np
import torch
from torch import nn

from unisono.programs import holders as h
from unisono.programs.forms import FORMS
from unisono.programs.frames import KEPT_FRAMES, KeptFrame
from unisono.programs.holders import Holder
from unisono.programs.iterators import is_frozen
from unisono.programs.live import live_variables, names_in, names_set_by, set_before_read
from unisono.programs.settings import PLAIN, SETTINGS_OF_PROCESS, note_settings

VISITED_AT_MOST = 20_000
_PICKLED_WITHIN_S = 0.01  # for an object made in C, to detect changes
LONG = 4096  # objects in longer containers are not looked at
_LEAVES = PLAIN | {range, slice, torch.dtype, torch.device, torch.Size, types.EllipsisType}
_LEAVES |= {PosixPath, PurePosixPath}  # which note their text when it is first asked for
GENERATORS: tuple[Any, ...] = (
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    torch.Generator,
)
GENERATORS += (np.random.RandomState,)
CACHED: Any = type(functools.lru_cache(lambda: None))
_NAMESPACES = {types.SimpleNamespace, argparse.Namespace}
_OF_PROCESS: tuple[Any, ...] = (
    io.IOBase,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
)
_OF_PROCESS += (logging.Logger, logging.Handler, logging.LoggerAdapter)
_OF_PROCESS += (threading.Condition, threading.Event, threading.local, type(sys))
_FLAGS = {threading.Event: ("_flag",), threading.Semaphore: ("_value",)}
_FLAGS[threading.BoundedSemaphore] = ("_value",)
_OF_RUNS = (
    "unisono.training",
    "unisono.engine",
    "unisono.runtime",
    "unisono.data",
)
_OF_C = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, mmap.mmap)
_OF_PYTHON = ("builtins", "_collections", "_multiprocessing")
_OF_LIBRARIES = ("site-packages", "dist-packages")
_NO_PROGRAMS = {"unisono", "torch", *sys.stdlib_module_names}
_OF_LAYERS = frozenset(vars(nn.Module())) - {"_modules", "training"}
_METHODS = (types.FunctionType, classmethod, staticmethod)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_LAYER_TABLES = ("_parameters", "_buffers")
_CONTAINERS = (dict, list, tuple, deque, set)
_PLAIN_CONTAINERS = {*_CONTAINERS, OrderedDict, Counter}
# torch's schedulers wrap `step` in a function of theirs.
_OF_OPTIMIZER = frozenset({"state", "param_groups", "step"})
_OF_MODULES = {*(name for name in globals() if name[:2] == "__"), "__path__", "__annotations__"}
_OF_CLASSES = {*vars(type("", (), {}))}  # names that Python sets

_BY_COMPUTED_NAMES = ({"globals"}, {"setattr", "__name__"})
"""Code with all names of one of these may compute names of its own module."""
_BY_NAMES_ELSEWHERE = ({"setattr"}, {"vars"}, {"__dict__"})
"""The same for other modules that the code names."""

Found = tuple[str, Any, bool]
"""The path to something, the thing, and whether the program's own objects led to it."""


@final
class Walk:
    """What `roots` lead to.

    Args:
        elsewhere: the identities of tensors that are stored elsewhere.
        layers: the identities of the modules and optimizers with those tensors.
        themselves: the identities of objects that save and load their own attributes.
        shallow: the identities of objects whose attributes count, but not what those lead to.

    Attributes:
        holders: the places with values, nearer ones first.
        paths: by identity, the path to each thing.
        generators: random generators by path, without the default ones.
        names: the names in the program's own code.
        of_modules: the identities of the parameters and buffers of modules that were found.
        unseen: by path, the class of objects made in C that cannot be inspected.
        lost: the same for what has parts that no path leads to, such as several alike in a set.
        is_cut: whether some objects were not visited.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        elsewhere: Collection[int] = (),
        layers: Collection[int] = (),
        themselves: Collection[int] = (),
        shallow: Collection[int] = (),
    ) -> None:
        self.holders: list[Holder] = []
        self.paths: dict[int, str] = {}
        self.things: dict[str, Any] = {}
        self._keys: set[str] = set()
        self.generators: dict[str, Any] = {}
        self.names: set[str] = set()
        self.of_modules: set[int] = set()
        self.unseen: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self.is_cut = False
        self._elsewhere, self._layers = elsewhere, layers
        self._themselves, self._shallow = themselves, shallow
        self._beside: set[int] = set()  # stored elsewhere, but already visited
        self._set: set[str] = set()  # names of attributes that the program's code sets
        self._spaces: dict[int, dict[str, str]] = {}  # of modules and classes: names, with paths
        self._by_name: dict[tuple[str, int], dict[str, str]] = {}  # the same, of libraries
        # By space: variables that a loop sets before it reads them, each with an empty path.
        self._set_first: dict[int, dict[str, str]] = {}
        self._modules: dict[str, types.ModuleType] = {}  # of the program, by path
        self._classes: dict[int, type] = {}  # the same, by identity
        self._default = default_generators()
        self.extend(roots)

    def extend(self, roots: Mapping[str, Any]) -> list[Holder]:
        """Walk from more objects; return the new holders."""
        begin = len(self.holders)
        waiting = deque[Found]((name, root, True) for name, root in roots.items())
        while waiting or self._add_what_is_named(waiting):
            if len(self.things) >= VISITED_AT_MOST:
                self.is_cut = True
                break
            path, value, is_own = waiting.popleft()
            if id(value) in self.paths or id(value) in self._default:
                continue
            if id(value) in self._elsewhere:
                if isinstance(value, torch.Tensor) and id(value) not in self._beside:
                    self._beside.add(id(value))
                    waiting.extend(self._hold(path, h.TENSOR, value, own=True))
                continue
            unique = path
            while unique in self.things:  # for example a method, which has its object's path
                unique += "'"
            self.paths[id(value)] = unique
            self.things[unique] = value  # stored, so that its `id` is not reused
            if isinstance(value, GENERATORS):
                if not isinstance(value, random.SystemRandom):
                    self.generators[path] = value
                    self._note(path, h.DRAWN, value, own=is_own)
                    if getattr(value, "__dict__", None):  # of a class of the program
                        waiting.append((f"{path}.__dict__", value.__dict__, is_own))
                continue
            try:
                for part, each, is_of_program in self._taken_apart(path, value, is_own=is_own):
                    if not _leads_nowhere(each):
                        waiting.append((part, each, is_of_program))
            except Exception:  # inspecting an object may raise anything
                continue
        return self.holders[begin:]

    def _add_what_is_named(self, waiting: deque[Found]) -> bool:
        """Follow what the code that was found names in the program's modules; False if nothing."""
        names, found = sorted({*self.names, "__getattr__"} - _OF_MODULES), list[Found]()
        for path, module in self._modules.items():
            space = vars(module)
            found += self._of_space(path, space, module.__name__, space, names)
            if type(module) is not types.ModuleType:
                found.append((path, type(module), False))
        dunder = sorted(name for name in self._set - _OF_CLASSES if name.startswith("__"))
        for kind in self._classes.values() if dunder else ():
            found += self._of_space(kind.__qualname__, kind, h.name_of(kind), vars(kind), dunder)
        for kind in self._classes.values() if "__subclasses__" in self.names else ():
            others: list[type] = type.__subclasses__(kind)
            found += ((f"{h.name_of(kind)}.{one.__name__}", one, False) for one in others)
        waiting += (one for one in found if id(one[1]) not in self.paths)
        return bool(waiting)

    def _note(self, path: str, kind: h.Kind, owner: Any, names: Any = None, *, own: bool) -> Holder:
        holder = Holder(path, kind, owner, names, not own, self._key(f"{kind.name} {path}"))
        self.holders.append(holder)
        return holder

    def _key(self, key: str) -> str:
        while key in self._keys:
            key += "'"
        self._keys.add(key)
        return key

    def _hold(
        self, path: str, kind: h.Kind, owner: Any, names: Any = None, *, own: bool
    ) -> Iterator[Found]:
        holder = self._note(path, kind, owner, names, own=own)
        names, values = holder.read()
        self.is_cut |= len(values) > LONG and not _are_leaves(values)
        if len(values) <= LONG and holder.kind not in (h.CONTENTS, h.BYTES, h.CACHE, h.TABLE):
            for at, value in enumerate(values):
                name = names[at] if names else at
                if holder.kind is h.ENTRIES and type(name) not in _LEAVES | {tuple}:
                    yield f"{path}.keys()[{at}]", name, own
                if _leads_nowhere(value) or name == "__class__":
                    continue
                if holder.kind is h.ENTRIES and type(name) is not str:
                    name = at  # other keys, such as hook IDs, may differ between processes
                yield holder.slot(name), value, own

    def _taken_apart(self, path: str, value: Any, *, is_own: bool) -> Iterator[Found]:
        kind = type(value)
        if value is SETTINGS_OF_PROCESS:
            self._note(path, h.SETTINGS, value, self.names, own=True)
            self._note("torch.autocast", h.AUTOCAST, torch.autocast, own=True)
            self._note("torch.overrides", h.MODES, torch.overrides, own=True)
        elif kind in weakref.ProxyTypes:
            yield path, value.__init__.__self__, is_own
        elif value.__class__ is not kind:  # it passes for what it delegates to
            yield from self._hold(path, h.ATTRIBUTES, value, own=is_own)
            yield f"{path}.{kind.__name__}", kind, False
        elif isinstance(value, dict):
            if not is_of_interpreter(value):
                yield from self._hold(path, h.ENTRIES, value, own=is_own)
        elif isinstance(value, (list, deque)):
            yield from self._hold(path, h.ITEMS, value, own=is_own)
        elif isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self._note(path, h.ELEMENTS, value, own=is_own)
            yield from self._of_elements(path, value, own=is_own)
        elif isinstance(value, tuple):
            yield from ((f"{path}[{at}]", part, is_own) for at, part in enumerate(value[:LONG]))
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                yield from self._hold(path, h.OBJECTS, value, own=is_own)
            else:
                self._note(path, h.CONTENTS, value, own=is_own)
            if kind is not np.ndarray:
                yield from self._hold(path, h.ATTRIBUTES, value, own=is_own)
        elif isinstance(value, torch.Tensor):
            self._note(path, h.CONTENTS, value, own=is_own)
            yield from self._hold(path, h.TENSOR, value, h.GRADIENT, own=is_own)
        elif isinstance(value, (memoryview, np.void)):
            self.lost[path] = kind.__name__  # what is behind it cannot be put back
        elif isinstance(value, contextvars.ContextVar):
            yield from self._hold(path, h.CONTEXT, value, own=True)
        elif isinstance(value, (bytearray, array.array, *_OF_C)):
            self._note(path, h.BYTES, value, own=is_own)
        elif is_frozen(kind):
            yield from self._hold(path, h.FROZEN, value, own=is_own)
        elif isinstance(value, h.SUSPENDABLE):
            if not h.gives_steps(value):
                yield from self._hold(path, h.SUSPENDED, value, own=is_own)
        elif isinstance(value, CACHED):
            if (results := h.results_of(value)) is None:
                self._note(path, h.CACHE, value, own=is_own)
            else:
                self._note(path, h.ENTRIES, results, own=is_own)
            yield path, value.__wrapped__, is_own
        elif isinstance(value, types.MethodType):
            yield path, value.__self__, False
            yield f"{path}.__func__", value.__func__, False
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            yield path, value.__self__, False
        elif kind in h.VIEWS:
            yield path, h.viewed(value), is_own
        elif isinstance(value, functools.partial):
            yield path, value.func, is_own
            yield f"{path}.args", value.args, is_own
            yield f"{path}.keywords", value.keywords, is_own
            yield from self._hold(path, h.ATTRIBUTES, value, own=is_own)
        elif isinstance(value, (staticmethod, classmethod)):
            yield path, value.__func__, False
        elif isinstance(value, property):
            yield from ((path, each, False) for each in (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):  # which has a lock before Python 3.12
            yield path, value.func, False
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, KEPT_FRAMES):
            yield from self._of_frame(path, value)
        elif isinstance(value, type):
            yield from self._of_class(path, value)
        elif isinstance(value, weakref.ref):
            yield path, value(), is_own
        elif not isinstance(value, types.ModuleType):
            yield from self._of_object(path, value, is_own=is_own)
        elif not is_of_a_library(value.__name__):
            self._modules[path] = value
        if kind not in _PLAIN_CONTAINERS and issubclass(kind, _CONTAINERS):
            yield from self._of_object(path, value, is_own=is_own)

    def _of_elements(self, path: str, values: Collection[Any], *, own: bool) -> Iterator[Found]:
        """Follow elements of a set, which have no order, by the names of their classes."""
        by_name = defaultdict[str, list[Any]](list)
        self.is_cut |= len(values) > LONG and not _are_leaves(values)
        for each in values if len(values) <= LONG else ():
            if type(each) not in _LEAVES | {tuple} and id(each) not in self._elsewhere:
                by_name[type(each).__name__].append(each)
        for name, each in sorted(by_name.items()):
            if len(each) == 1:
                yield f"{path}.{name}", each[0], own
            elif any(_may_change(one) and id(one) not in self.paths for one in each):
                self.lost[path] = f"set with several of {name}"

    def _of_function(self, path: str, value: types.FunctionType) -> Iterator[Found]:
        # That of executed text may have no module.
        own = value.__module__ is None or not is_of_a_library(value.__module__)
        if own:
            yield from self._hold(path, h.FUNCTION, value, self._set, own=own)
        else:
            yield f"{path}.__defaults__", value.__defaults__, own
            yield path, value.__kwdefaults__, own
        if value.__closure__:
            yield from self._hold(path, h.CELLS, value, own=own)
        if own or value.__dict__:  # which may get its first attribute later
            yield from self._hold(path, h.ATTRIBUTES, value, own=own)
        if own:
            code = value.__code__
            yield from self._of_names(path, value.__globals__, set(names_in(code)), code)

    def _of_names(
        self, path: str, space: dict[str, Any], names: set[str], code: types.CodeType
    ) -> Iterator[Found]:
        """Follow the names in a function's code, in its module and in modules that it names."""
        self.names |= names
        self._set |= names_set_by(code)
        spaces = {path: space}
        for name in sorted(names & space.keys()):
            module = space[name]
            if isinstance(module, types.ModuleType) and not is_of_a_library(module.__name__):
                spaces[f"{path}.{name}"] = vars(module)
        packages, package = [""], space.get("__package__")
        while package:
            packages.append(f"{package}.")
            package = package.rpartition(".")[0]
        imported = {f"{package}{name}" for package in packages for name in names}
        for name in sorted(imported & sys.modules.keys()):  # within the function, too
            if not is_of_a_library(name):
                yield name, sys.modules[name], True
        for where, there in spaces.items():
            self._note_patched(there, names, names_set_by(code))
            ways = _BY_COMPUTED_NAMES if there is space else _BY_NAMES_ELSEWHERE
            are_all, first = any(map(names.issuperset, ways)), self._set_first.get(id(there), {})
            all_names = {*names, "__getattr__"}
            if are_all:
                all_names |= {name for name in (*there, h.ANY) if name[:2] != "__"} - {*first}
            chosen = sorted(all_names - _OF_MODULES)
            yield from self._of_space(where, there, str(there.get("__name__")), there, chosen)
            if are_all:
                known = self._spaces[id(there)]
                known |= {name: "" for name in first if name not in known}

    def _note_patched(
        self, space: Mapping[str, Any], names: set[str], names_set: Collection[str]
    ) -> None:
        """Record what is reached only by name in libraries: in modules, classes and objects."""
        imported = {n: sys.modules[n] for n in names & sys.modules.keys()}  # within a function
        waiting: list[tuple[str, Mapping[str, Any]]] = [("", space), ("", imported)]
        seen = set[int]()
        while waiting:
            path, space = waiting.pop()
            for name in sorted(names & space.keys()):
                owner = space[name]
                module = _module_of(owner)
                is_ours = module.startswith("unisono")
                if id(owner) in seen or is_ours or not is_of_a_library(module):
                    continue
                if isinstance(owner, (types.ModuleType, type)):
                    seen.add(id(owner))
                    self._note_space(owner, names, names_set)
                    waiting.append((_name(owner), vars(owner)))
                elif callable(owner) and module in sys.modules:
                    note_settings(sys.modules[module], [name])
                elif path and type(owner) not in _LEAVES | _PLAIN_CONTAINERS:
                    there = _there(owner, names_set)
                    self._hold_by_name(f"{path}.{name}", h.COMPUTED, owner, there)

    def _note_space(self, owner: Any, names: set[str], names_set: Collection[str]) -> None:
        """Record the names in a module or a class of a library, and the settings among them."""
        path, there = _name(owner), names & vars(owner).keys()
        note_settings(owner, there)
        if isinstance(owner, types.ModuleType) and owner is not builtins:
            names = there  # some modules create attributes on first access
        read = (name for name in names.difference(names_set) if name[:2] != "__")
        self._hold_by_name(path, h.PATCHED, owner, read)
        self._hold_by_name(path, h.ADDED, owner, set(names_set) - _OF_CLASSES)
        if isinstance(owner, types.ModuleType) and type(owner) is not types.ModuleType:
            computed = (name for name in names_set if name not in vars(owner))
            self._hold_by_name(path, h.COMPUTED, owner, _there(owner, computed))

    def _hold_by_name(self, path: str, kind: h.Kind, owner: Any, names: Iterable[str]) -> None:
        there = {name: f"{path}.{name}" for name in names}
        known = self._by_name.get((kind.name, id(owner)))
        if known is None and there:
            known = self._by_name[kind.name, id(owner)] = {}
            key = self._key(f"{kind.name} of {path}")
            self.holders.append(Holder(path, kind, owner, known, key=key))
        if known is not None:
            known |= there

    def _of_space(
        self, path: str, owner: Any, key: str, space: Mapping[str, Any], names: Collection[str]
    ) -> Iterator[Found]:
        """Record names of a module or a class: as one place, whatever leads to it."""
        known = self._spaces.get(id(owner))
        if known is None:
            known = self._spaces[id(owner)] = {}
            key = self._key(f"{h.NAMES.name} of {key}")
            self.holders.append(Holder(path, h.NAMES, owner, known, key=key))
        for name in names:
            if not known.get(name):
                known[name] = f"{path}.{name}".lstrip(".")
                if name in space and type(space[name]) not in _LEAVES:
                    yield known[name], space[name], True

    def _of_frame(self, path: str, frame: KeptFrame) -> Iterator[Found]:
        code = frame.f_code
        names = {*names_in(code), *code.co_varnames, *code.co_cellvars, *code.co_freevars}
        named, live = set(self.names), live_variables(frame)
        self.names |= names
        if frame.f_locals is not frame.f_globals:
            mine = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
            yield from self._hold(path, h.FRAME, frame, sorted(mine & live), own=True)
            names -= mine
        else:
            first = dict.fromkeys(set_before_read(frame) - named, "")
            self._set_first[id(frame.f_globals)] = first
            if h.ANY in (known := self._spaces.get(id(frame.f_globals), {})):
                known |= first
        yield from self._of_names(path, frame.f_globals, names & live, code)

    def _of_class(self, path: str, value: type) -> Iterator[Found]:
        if issubclass(value, enum.Enum):
            yield from ((f"{path}.{each.name}", each, True) for each in value)
        if not is_of_a_library(type(value).__module__):
            yield f"{path}.{type(value).__name__}", type(value), False
        for each in value.__mro__:
            if is_of_a_library(each.__module__):
                continue
            members = vars(each)
            self._classes[id(each)] = each
            internal = "_" if issubclass(each, enum.Enum) else "__"  # its tables of members
            mine = _named_by(each)
            names = [name for name in members if not name.startswith(internal) or name in mine]
            key = h.name_of(each)
            yield from self._of_space(path, each, key, members, names)
            yield from (
                (f"{path}.{name}", member, True)
                for name, member in members.items()
                if name[:2] == "__" and isinstance(member, _METHODS)
            )

    def _of_object(self, path: str, value: Any, *, is_own: bool) -> Iterator[Found]:
        kind: Any = type(value)
        if kind.__module__.startswith(_OF_RUNS):
            return  # objects of ours that lead back to the whole program
        own = (kind in _NAMESPACES and is_own) or not is_of_a_library(kind.__module__)
        if isinstance(value, (io.StringIO, io.BytesIO)):
            self._note(path, h.FILE, value, own=own)
        elif isinstance(value, io.IOBase) and value.readable() and not value.writable():
            self._note(path, h.POSITION, value, own=own)
        if isinstance(value, queue.Queue) and hasattr(value, "queue"):  # a subclass may have none
            yield f"{path}.queue", value.queue, is_own
        if kind.__module__ == "multiprocessing.sharedctypes":
            yield path, value.get_obj(), is_own
        if isinstance(value, threading.local):
            yield from self._hold(path, h.ATTRIBUTES, value, own=True)
        if isinstance(value, _OF_PROCESS) or (not own and is_of_process(value)):
            if is_own and h.attributes_of(value) and not isinstance(value, threading.local):
                self._note(path, h.NAMED, value, _FLAGS.get(kind, self.names), own=True)
                if own:  # what its own class adds
                    yield from self._hold(path, h.ATTRIBUTES, value, _of_bases(kind), own=True)
                    yield f"{path}.{kind.__name__}", kind, False
                within = _within(path, h.attributes_of(value) or {}, own=True)
                yield from (one for one in within if not is_of_a_library(type(one[1]).__module__))
            return
        without: Collection[str] | None = _of_bases(kind, _OF_RUNS) if own else None
        if isinstance(value, nn.Module):
            own_state = (*value._parameters.values(), *value._buffers.values())
            self.of_modules |= set(map(id, own_state))
            # Parameters and buffers of the run's layers are stored elsewhere.
            is_layer = id(value) in self._layers
            without = _OF_LAYERS if is_layer else _HOOKS
            yield from self._hold(path, h.HOOKS, value, _HOOKS, own=own)
            if is_layer:
                self._note(path, h.TABLE, value, _LAYER_TABLES, own=own)
                for name, parameter in value._parameters.items():
                    yield f"{path}.{name}", parameter, own
        elif isinstance(value, torch.optim.Optimizer) and id(value) in self._layers:
            without = _OF_OPTIMIZER
            if "step" in vars(value):
                yield f"{path}.step", vars(value)["step"], True
        if id(value) in self._shallow:
            self._note(path, h.ATTRIBUTES, value, own=own)
        elif id(value) in self._themselves:
            yield from _within(path, h.attributes_of(value) or {}, own=own)
        elif h.attributes_of(value) is not None:
            yield from self._hold(path, h.ATTRIBUTES, value, without, own=own)
        if slots := h.slots_of(kind):
            yield from self._hold(path, h.SLOTS, value, slots, own=own)
        if h.layout_of(kind) is None and is_own:
            self._note_made_in_c(path, value)
        elif h.layout_of(kind) is None:  # such as a column of pandas
            parts = enumerate(gc.get_referents(value))
            kinds = (*h.ARRAYS, tuple)
            yield from ((f"{path}[{at}]", p, False) for at, p in parts if isinstance(p, kinds))
        if own:
            yield f"{path}.{kind.__name__}", kind, False

    def _note_made_in_c(self, path: str, value: Any) -> None:
        """Record an object of the program that holds more than attributes and slots."""
        kind: Any = type(value)
        if kind.__module__ in _OF_PYTHON or any(form.fits(value) for form in FORMS.values()):
            return
        begun_s = time.thread_time()
        try:
            h.MADE_IN_C.read(value, None)
            is_seen = time.thread_time() - begun_s < _PICKLED_WITHIN_S
        except Exception:  # pickling it may raise anything
            is_seen = False
        if is_seen:
            self._note(path, h.MADE_IN_C, value, own=not is_of_a_library(kind.__module__))
        else:
            self.unseen[path] = h.name_of(kind)


@functools.cache
def _of_bases(kind: type, modules: tuple[str, ...] = ("",)) -> set[str]:
    """Return the names in the code of a class's bases that are a library's: their attributes."""
    bases = (one for one in kind.__mro__ if one.__module__.startswith(modules))
    return set[str]().union(*(_named_by(one) for one in bases if is_of_a_library(one.__module__)))


def _named_by(kind: type) -> set[str]:
    """Return the names in the code of a class, except those that Python sets in classes."""
    functions = (getattr(one, "__func__", one) for one in vars(kind).values())
    codes = (one.__code__ for one in functions if isinstance(one, types.FunctionType))
    return set[str]().union(*map(names_in, codes)) - _OF_CLASSES


def _leads_nowhere(value: Any) -> bool:
    kind = type(value)
    return kind in _LEAVES or (kind in (tuple, frozenset) and not value)


def _may_change(value: Any) -> bool:
    """Return whether a value has attributes of its own, unlike functions, classes and members."""
    is_one = isinstance(value, (type, types.FunctionType, types.ModuleType, enum.Enum))
    kind: Any = type(value)
    return not is_one and bool(h.attributes_of(value) or h.slots_of(kind))


def _are_leaves(values: Collection[Any]) -> bool:
    """Return whether values are plain ones, or tuples of such."""
    kinds = set(map(type, values))
    if not kinds <= _LEAVES | {tuple}:
        return False
    tuples = (value for value in values if type(value) is tuple)
    return tuple not in kinds or all(_LEAVES.issuperset(map(type, each)) for each in tuples)


def _module_of(owner: Any) -> str:
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    is_named = isinstance(owner, (type, types.FunctionType, types.BuiltinFunctionType))
    return str((owner if is_named else type(owner)).__module__)


def _there(owner: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield those names that a library's object has as attributes."""
    for name in names:
        with suppress(Exception):
            getattr(owner, name)
            yield name


def _name(owner: Any) -> str:
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    return h.name_of(owner)


def _within(path: str, table: Mapping[str, Any], *, own: bool) -> Iterator[Found]:
    """Yield the values of attributes and of lists in them, but no containers themselves."""
    for name, value in table.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        yield from (
            (f"{path}.{name}" if parts[0] is value else f"{path}.{name}[{at}]", part, own)
            for at, part in enumerate(parts)
            if not isinstance(part, _CONTAINERS)
        )


def default_generators() -> dict[int, Any]:
    """Return the default generators, which are always seeded, by identity."""
    of_numpy: Any = np.random.mtrand._rand
    defaults = [random._inst, of_numpy, of_numpy._bit_generator, torch.default_generator]
    return {id(each): each for each in defaults}


def is_of_interpreter(value: dict[Any, Any]) -> bool:
    """Return whether a dict has all modules, or the names of one that is a library's."""
    if value is sys.modules:
        return True
    name = dict.get(value, "__name__")
    module = sys.modules.get(name) if type(name) is str else None
    return module is not None and vars(module) is value and is_of_a_library(name)


def is_of_process(value: Any, depth: int = 3) -> bool:
    """Return whether a library's object holds a file, a lock, a thread or the like."""
    if isinstance(value, _OF_PROCESS):
        return not isinstance(value, types.ModuleType)
    if depth == 0:
        return False
    parts: Collection[Any] = ()
    if isinstance(value, (list, tuple, deque)):
        parts = list(value)[:16]
    elif isinstance(value, dict):
        parts = list(value.values())[:16]
    elif is_of_a_library(type(value).__module__) and not isinstance(value, (type, nn.Module)):
        parts = list((h.attributes_of(value) or {}).values())
    return any(is_of_process(part, depth - 1) for part in parts if type(part) not in _LEAVES)


def is_of_a_library(module: str | None) -> bool:
    """Return whether a module came with Python or was installed, judging by its file.

    One that Python does not list is the program's, such as a plugin that is loaded from its path.
    """
    name = module or "builtins"
    while name not in sys.modules and "." in name:
        name = name.rpartition(".")[0]
    if name not in sys.modules or not _is_installed(name):
        return False
    # It may be what was started, as `python -m package.train`.
    started = getattr(sys.modules["__main__"], "__spec__", None)
    package = name.partition(".")[0]
    return started is None or package != started.name.partition(".")[0] or package in _NO_PROGRAMS


@functools.cache
def _is_installed(name: str) -> bool:
    found = sys.modules[name]
    if name in ("__main__", "__mp_main__") or not isinstance(found, types.ModuleType):
        return False
    file = getattr(found, "__file__", None)
    if file is None or name.partition(".")[0] == "unisono":
        return True
    parts = Path(file).parts
    return any(name in parts for name in _OF_LIBRARIES) or file.startswith(
        sysconfig.get_paths()["stdlib"]
    )


def is_of_program(frame: KeptFrame) -> bool:
    """Return whether a frame runs code of the program."""
    return not is_of_a_library(frame.f_globals.get("__name__"))


def programs_own(function: Any) -> Any:
    """Return the program's own function, without our wrappers."""

    def is_own(function: Any) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        return not module.startswith("unisono.")

    return inspect.unwrap(function, stop=is_own)

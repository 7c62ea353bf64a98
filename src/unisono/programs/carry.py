"""Converts a program's values to plain data and tensors, and back in a restarted program.

::

    3, "a", tensors       themselves
    known things          {"@": "at", path}: what the restarted program has at this path
    functions, classes    {"@": "name", module, name}: what the restarted program has by this name
    closures, lambdas     {"@": "function", …}: the same code in the restarted program, with cells
    containers, objects   {"@": kind, "n": number, parts}; seen again {"@": "again", number}

Unpacking never imports or calls anything that the data names: classes and functions must be defined
by the program's own code, or be what that code gets by names in it, and objects are created without
calling their class. Functions that act on files or the system are not restored even then. Others
raise :class:`Opaque`.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import inspect
import json
import random
import sys
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast, final

import numpy as np
import torch
from torch import nn

from unisono.programs import holders as h
from unisono.programs.arrays import elements, has_text
from unisono.programs.forms import FORMS, Opaque, is_value, leads_to
from unisono.programs.frames import KEPT_FRAMES
from unisono.programs.live import may_set, names_in
from unisono.programs.overlaps import (
    KnownMemory,
    PartOfMemory,
    Span,
    copy_of_memory,
    made_in,
    part_of,
    span_of,
)
from unisono.programs.walk import is_of_a_library
from unisono.runtime.device import bytes_of, on_host

Packed = Any
_CLASSES = {"bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set"}
_OF_BUILTINS = {"abs", "all", "any", "chr", "divmod", "hash", "id", "len", "max", "min", "ord"}
_OF_BUILTINS |= {"pow", "repr", "round", "sorted", "sum"}
# Modules of Python whose functions and classes touch neither files nor the system.
_INERT = {"_collections", "_decimal", "_functools", "_heapq", "_operator", "_queue", "_random"}
_INERT |= {"_bisect", "abc", "argparse", "array", "bisect", "builtins", "calendar", "cmath"}
_INERT |= {"collections", "colorsys"}
_INERT |= {"configparser", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum"}
_INERT |= {"fractions", "functools", "graphlib", "heapq", "ipaddress", "itertools", "json", "math"}
_INERT |= {"numbers", "operator", "queue", "random", "re", "statistics", "string", "textwrap"}
_INERT |= {"time", "types", "typing", "uuid", "weakref"}
_ACTS = {"breakpoint", "compile", "delattr", "download", "dump", "eval", "exec", "import", "input"}
_ACTS |= {"install", "launch", "load", "setattr"}
_ACTS |= {"loads", "open", "pickle", "pretrained", "read", "run", "save", "spawn", "system"}
_ACTS |= {"write"}
_WITH_MODULES = (types.FunctionType, type)
_OF_NUMPY = (np.ufunc, type(np.mean))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, *_OF_NUMPY)
_MEMORIES = (torch.Tensor, np.ndarray)
_OF_LAYOUT = ("__dict__", "__weakref__")
_DEEPEST = 100  # what examines packed values calls itself for each level
_ADDRESS = 1 << 32  # the `id` of an object is larger
AS_IT_IS = (type(None), bool, int, float, str)
# Where functions that are made in C are found, of which many do not know their module.
_MODULES = ("torch", "torch._C", "torch.nn.functional", "numpy", "math", "builtins")
_OF_C = ("builtin_function_or_method", "method_descriptor")


class Ours(Opaque):
    """An object of this package, which does not belong to the program's state."""


@final
class Known:
    """A program's objects before anything is restored: by path, and by the names its code uses.

    `tensors` are the model's, by name.
    """

    def __init__(
        self, things: Mapping[str, Any], names: set[str], tensors: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.things, self.names = things, names
        self._tensors, self._then = tensors, dict(tensors())
        self._imported = {*sys.modules}

    @functools.cached_property
    def _kinds(self) -> set[int]:
        return {id(type(thing)) for thing in self.things.values()}

    @functools.cached_property
    def _modules(self) -> dict[str, types.ModuleType]:
        """The program's own modules."""
        owners = (one for one in self.things.values() if isinstance(one, _WITH_MODULES))
        names = {str(owner.__module__) for owner in owners}
        own = {name for name in names & sys.modules.keys() if not is_of_a_library(name)}
        return {name: sys.modules[name] for name in sorted(own | {"__main__"})}

    @functools.cached_property
    def _codes(self) -> dict[str, types.CodeType]:
        found: dict[str, types.CodeType] = {}
        for thing in [*self.things.values()]:
            if isinstance(thing, types.FunctionType):
                found |= {key_of(code): code for code in _codes_in(thing.__code__)}
        for module in self._modules.values():
            with suppress(Exception):
                source = inspect.getsource(module)
                whole = compile(source, module.__file__ or "", "exec", dont_inherit=True)
                for code in _codes_in(whole):
                    found.setdefault(key_of(code), code)
        return found

    @functools.cached_property
    def _reached(self) -> set[int]:
        """The identities of what the program's code can get by the names in it.

        Those of code outside of functions count, too, and names of imported modules.
        """
        names = self.names.union(*map(names_in, self._codes.values()))
        imported = [sys.modules[name] for name in names & sys.modules.keys()]
        found = set(map(id, imported))
        waiting = [vars(module) for module in (builtins, *self._modules.values(), *imported)]
        while waiting:
            space = waiting.pop()
            for one in [space[name] for name in names & space.keys()]:
                one = _bare(one)
                if id(one) not in found:
                    found.add(id(one))
                    if isinstance(one, types.ModuleType):
                        waiting.append(vars(one))
                    elif isinstance(one, type):
                        waiting += map(vars, one.__mro__)
        return found

    def code(self, key: str) -> types.CodeType | None:
        """Return the program's code with this key."""
        return self._codes.get(key)

    def named(self, module: str, name: str) -> Any:
        """Return the program's object with a qualified name, if its own code may use it."""
        found: Any = sys.modules.get(module)
        passed = []
        for part in name.split("."):
            found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
            found = None if isinstance(found, types.ModuleType) else _bare(found)
            passed.append(found)
        is_one = isinstance(found, (type, *_FUNCTIONS)) and self._is_allowed(found, passed)
        if not is_one or module not in self._imported:  # restoring a value imports no module
            raise Opaque(f"{module}.{name}")
        return found

    def module(self, name: str) -> types.ModuleType:
        """Return a module that the program's code names."""
        found = sys.modules.get(name)
        if found is None or id(found) not in self._reached or not _is_inert(name, ""):
            raise Opaque(name)
        return found

    def _is_allowed(self, found: Any, passed: list[Any]) -> bool:
        """Return whether an object may be restored; `passed`: the classes that it is in, and it."""
        module, name = _module_of(found), found.__name__
        if module == "builtins" and name in _OF_BUILTINS | _CLASSES:
            return True
        if module == "builtins" and isinstance(found, types.MethodDescriptorType):
            return True
        return (
            not is_of_a_library(module)
            or id(found) in self._kinds
            or (module.startswith("unisono.") and _is_data(found))
            or _is_harmless(found)
            or (_is_inert(module, name) and any(id(one) in self._reached for one in passed))
        )

    def tensor(self, name: str) -> Any:
        """Return one of the model's tensors, by its name when this object was created."""
        now = self._tensors()
        return now[name] if name in now else self._then[name]

    def names_of_tensors(self) -> dict[int, str]:
        """Return those names by identity; tensors registered later have none."""
        then = {id(tensor): name for name, tensor in self._then.items()}
        now = {id(tensor): name for name, tensor in self._tensors().items() if self._is_known(name)}
        return now | then

    def tensors(self) -> Mapping[str, Any]:
        """Return the model's tensors by those names."""
        now = {name: one for name, one in self._tensors().items() if self._is_known(name)}
        return {**self._then, **now}

    def _is_known(self, name: str) -> bool:
        """Return whether other processes have a tensor; optimizers create their state in steps."""
        return name in self._then or name.startswith("optimizer ")


def _bare(found: Any) -> Any:
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def _module_of(found: Any) -> str:
    """Return the module of a class or a function; "" if it is unknown."""
    owner = getattr(found, "__objclass__", None) or getattr(found, "__self__", None)
    of_owner = getattr(owner, "__module__", None) or getattr(owner, "__name__", None)
    return str(getattr(found, "__module__", None) or of_owner or "")


def _is_inert(module: str, name: str) -> bool:
    """Return whether a library's object acts on neither files nor the system, by its name."""
    package = module.partition(".")[0]
    is_of_python = package in sys.stdlib_module_names and package not in _INERT
    return not is_of_python and _ACTS.isdisjoint(name.split("_"))


def _is_data(found: Any) -> bool:
    """Return whether an object is a class of containers, as that of a step's means is."""
    return isinstance(found, type) and issubclass(found, (dict, list, tuple))


def _is_harmless(found: Any) -> bool:
    """Return whether an object is a class of arrays, of what torch returns, its layers or hooks.

    Creating one does nothing else.
    """
    return isinstance(found, type) and (
        issubclass(found, (nn.Module, np.ndarray, np.generic))
        or found.__module__ in ("torch.return_types", "torch.utils.hooks", "torch.nn.utils.prune")
    )


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def key_of(code: types.CodeType) -> str:
    """Return a key of a code object that is the same in another process of the same program."""
    text = repr((code.co_code, code.co_names, code.co_freevars, [*map(_constant, code.co_consts)]))
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
    return f"{code.co_qualname}:{code.co_firstlineno}:{digest}"


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return key_of(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


@final
class Packer:
    """Converts values to plain data, for one examination of a program.

    `shared`: memory that several new tensors or arrays have in common; `spans` is where they lie.
    `named`: new objects by the `id` that the program has stored somewhere.
    """

    def __init__(
        self,
        known: Known,
        shared: Iterable[Span] = (),
        named: Mapping[int, Any] = types.MappingProxyType({}),
    ) -> None:
        self._known, self._named = known, named
        self._addresses: set[int] = set()  # integers that may be the `id` of an object
        self._shared = {span: copy_of_memory(span) for span in shared}
        self.spans: list[Span] = []
        self._whole: Any = None
        self._numbers: dict[int, int] = {}
        self._memories: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._kept: list[Any] = []  # so that their `id` is not reused
        self._depth = 0

    # Plain values, which are most of what programs change, need neither.

    @functools.cached_property
    def _paths(self) -> dict[int, str]:
        return {id(thing): path for path, thing in self._known.things.items()}

    @functools.cached_property
    def _of_model(self) -> dict[int, str]:
        return self._known.names_of_tensors()

    def pack(self, value: Any, *, inside: bool = False) -> Packed:
        """Convert a value; raises Opaque. `inside`: convert the value, not its known path."""
        kind = type(value)
        if kind is int and value > _ADDRESS:
            return self._address(value)
        if kind in AS_IT_IS:
            return value
        if kind in h.SUSPENDABLE and h.gives_steps(value):
            raise Ours("the steps")
        if not inside:
            if id(value) in self._of_model:
                return {"@": "model", "name": self._of_model[id(value)]}
            if id(value) in self._paths and not leads_to(value, is_value):
                return {"@": "at", "path": self._paths[id(value)]}
            if id(value) in self._numbers:
                return {"@": "again", "n": self._numbers[id(value)]}
        if kind.__module__.startswith("unisono.") and not (inside or _is_data(kind)):
            if (data := getattr(value, "as_data", None)) is None:
                raise Ours(kind.__qualname__)
            return self.pack(data)
        self._numbers[id(value)] = number = len(self._numbers)
        self._kept.append(value)
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                raise Opaque(f"a chain of more than {_DEEPEST} objects, each in the one before,")
            return {"n": number, **self._taken_apart(value, kind)}
        except Exception as error:
            while len(self._numbers) > number:  # nothing has them
                self._numbers.popitem()
            if isinstance(error, (Opaque, RecursionError)):
                raise
            raise Opaque(
                f"a {h.name_of(kind)} (reading it raised {h.name_of(type(error))})"
            ) from error
        finally:
            self._depth -= 1

    def _each(self, values: Any) -> list[Packed]:
        return [self.pack(value) for value in values]

    def _address(self, number: int) -> Packed:
        """Convert a number that may be the `id` of an object, which differs elsewhere."""
        if number in self._of_model:
            return {"@": "id", "of": {"@": "model", "name": self._of_model[number]}}
        if number in self._paths:
            return {"@": "id", "of": {"@": "at", "path": self._paths[number]}}
        if number in self._named:
            return {"@": "id", "of": self.pack(self._named[number])}
        self._addresses.add(number)
        return number

    def named(self) -> dict[int, Any]:
        """Return the new objects whose `id` is somewhere in what was packed."""
        return {id(one): one for one in self._kept if id(one) in self._addresses}

    def _taken_apart(self, value: Any, kind: Any) -> dict[str, Any]:
        if kind is np.ndarray and has_text(value.dtype) and not value.dtype.hasobject:
            in_memory = self._in_memory(value)
            if in_memory is not value:
                return {"@": "array", "of": in_memory}
        for name, form in FORMS.items():
            if form.fits(value):
                packed = {"@": name, "of": self._each(form.parts(value))}
                if name == "weak":
                    _check_callback(packed["of"])
                return packed
        if isinstance(value, np.generic):
            return {"@": "array", "of": value}
        if isinstance(value, _MEMORIES):
            return self._of_memory(value, kind)
        if isinstance(value, random.Random):
            raise Opaque(kind.__name__)
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, types.CodeType) and self._known.code(key_of(value)) is not None:
            return {"@": "code", "code": key_of(value)}
        if isinstance(value, (type, *_OF_NUMPY)) or kind.__name__ in _OF_C:
            return self._of_name(value)
        if isinstance(value, types.ModuleType) and self._known.module(value.__name__) is value:
            return {"@": "module", "module": value.__name__}
        return self._of_object(value, kind)

    def _of_memory(self, value: Any, kind: Any) -> dict[str, Any]:
        if kind is np.ndarray:
            return {"@": "array", "of": value}
        if isinstance(value, np.ndarray):
            return {
                "@": "subclass",
                "of": self.pack(elements(value)),
                "class": self._class(kind),
                "attributes": [
                    [n, self.pack(v)] for n, v in (h.attributes_of(value) or {}).items()
                ],
            }
        if value.layout is not torch.strided:
            raise Opaque(f"a tensor of layout {value.layout}")
        if value.is_nested or value.is_quantized:
            raise Opaque(f"a {'nested' if value.is_nested else 'quantized'} tensor")
        is_lazy = value.is_conj() or value.is_neg()
        for name, tensor in self._sharing(value):
            offset = value.storage_offset() - tensor.storage_offset()
            if is_lazy:
                raise Opaque("a conjugated or negated view")
            if 0 <= offset < max(1, tensor.numel()) and value.dtype == tensor.dtype:
                shape = [list(value.shape), list(value.stride()), offset]
                return {"@": "view", "name": name, "of": shape}
        of = self._in_memory(value.detach(), id(value))
        if is_lazy:
            if isinstance(of, dict):
                raise Opaque("a conjugated or negated view")
            of = of.resolve_conj().resolve_neg()
        packed = {
            "@": "tensor",
            "of": of,
            "needs": value.requires_grad and value.is_leaf,
            "is_parameter": isinstance(value, nn.Parameter),
            "host": value.device.type == "cpu",
        }
        if kind not in (torch.Tensor, nn.Parameter):
            packed["class"] = self._class(kind)
        names, values = h.TENSOR.read(value, h.GRADIENT)
        if any(part is not None and part != () for part in values):
            packed["more"] = [list(names), self._each(values)]
        return packed

    def _in_memory(self, value: Any, identity: int = 0) -> Any:
        """Return a tensor or an array, or where it lies in memory that others have as well."""
        is_known = (identity or id(value)) in self._paths
        span = None if is_known or value is self._whole else span_of(value)
        if span is None:
            return value
        if (known := self._known_memory.around(span)) is not None:
            memory, begin = known
            return {"@": "part", "of": [memory, *part_of(value, begin)]}
        self.spans.append(span)
        for (begin, end), memory in self._shared.items():
            if begin <= span[0] < end:
                self._whole = memory
                return {"@": "part", "of": [self.pack(memory), *part_of(value, begin)]}
        return value

    @functools.cached_property
    def _known_memory(self) -> KnownMemory:
        things, tensors = self._known.things.items(), self._known.tensors().items()
        return KnownMemory(
            [({"@": "at", "path": path}, thing) for path, thing in things]
            + [({"@": "model", "name": name}, tensor) for name, tensor in tensors]
        )

    def _sharing(self, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if not self._memories:
            for name, tensor in self._known.tensors().items():
                if tensor.layout is torch.strided:
                    memory = tensor.untyped_storage().data_ptr()
                    self._memories.setdefault(memory, []).append((name, tensor))
        return self._memories.get(value.untyped_storage().data_ptr() or -1, [])

    def _of_function(self, value: types.FunctionType) -> dict[str, Any]:
        with suppress(Opaque):
            if self._known.named(value.__module__, value.__qualname__) is value:
                return {"@": "name", **_name_of(value)}
        if (value.__module__ or "").startswith("unisono."):
            raise Ours(value.__qualname__)
        key, module = key_of(value.__code__), sys.modules.get(value.__module__ or "")
        is_of_module = module is not None and vars(module) is value.__globals__
        space = value.__module__ if is_of_module else self._spaces.get(id(value.__globals__))
        if self._known.code(key) is None or space is None:
            raise Opaque(f"the function {value.__qualname__}")
        cells = value.__closure__ or ()
        packed = [
            self._cell(cell, name, value.__code__)
            for cell, name in zip(cells, value.__code__.co_freevars, strict=True)
        ]
        for cell, each in zip(cells, packed, strict=True):  # once all have numbers
            if each["@"] == "cell":
                with suppress(ValueError):  # empty
                    each["of"].append(self.pack(cell.cell_contents))
        return {
            "@": "function",
            "module": space,
            "code": key,
            "of": packed,
            "defaults": self.pack(value.__defaults__),
            "keywords": self.pack(value.__kwdefaults__),
            "attributes": self.pack(dict(value.__dict__)),
        }

    def _cell(self, cell: types.CellType, name: str, code: types.CodeType) -> dict[str, Any]:
        """Return where another process has a cell, or a new one without its content."""
        if id(cell) in self._cells:
            return {"@": "cell of", "of": list(self._cells[id(cell)])}
        if id(cell) in self._numbers:
            return {"@": "again", "n": self._numbers[id(cell)]}
        frames = (one for one in self._known.things.values() if isinstance(one, KEPT_FRAMES))
        if any(code in _codes_in(one.f_code) and may_set(one, name) for one in frames):
            raise Opaque(f"a function that shares the variable `{name}` with the loop")
        self._numbers[id(cell)] = number = len(self._numbers)
        self._kept.append(cell)
        return {"@": "cell", "n": number, "of": []}

    @functools.cached_property
    def _spaces(self) -> dict[int, Packed]:
        """Where another process has a function with these globals, by their identity."""
        return {
            id(thing.__globals__): {"@": "at", "path": path}
            for path, thing in self._known.things.items()
            if isinstance(thing, types.FunctionType)
        }

    @functools.cached_property
    def _cells(self) -> dict[int, tuple[str, int]]:
        """The path to a function, and the index in its closure, by the identity of each cell."""
        return {
            id(cell): (path, at)
            for path, thing in self._known.things.items()
            if isinstance(thing, types.FunctionType)
            for at, cell in enumerate(thing.__closure__ or ())
        }

    def _of_name(self, value: Any) -> dict[str, Any]:
        of = getattr(value, "__self__", None)
        module = str(getattr(value, "__module__", None) or getattr(of, "__name__", ""))
        name = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", ""))
        for place in (module, *_MODULES):
            for known_as in (name, name.rpartition(".")[2]):
                with suppress(Opaque, KeyError, TypeError):
                    if self._known.named(place, known_as) is value:
                        return {"@": "name", "module": place, "name": known_as}
        raise Opaque(f"{module}.{name}")

    def _class(self, kind: Any) -> dict[str, Any]:
        if id(kind) in self._paths:
            return {"@": "at", "path": self._paths[id(kind)]}
        return self._of_name(kind)

    def _of_object(self, value: Any, kind: Any) -> dict[str, Any]:
        base = h.layout_of(kind)
        if base is None:
            raise Opaque(f"a {h.name_of(kind)}")
        callbacks = (getattr(one, "__callback__", None) for one in weakref.getweakrefs(value))
        if weakref.finalize in map(type, callbacks):
            raise Opaque(f"a {h.name_of(kind)} with a finalizer")
        packed: dict[str, Any] = {"@": "object", "base": base.__name__}
        if kind not in (object, *h.BASES):
            packed["class"] = self._class(kind)
        if issubclass(kind, dict):
            packed["items"] = [[self.pack(k), self.pack(v)] for k, v in dict.items(value)]
        elif issubclass(kind, (list, deque, set)):
            packed["items"] = self._each(base.__iter__(value))
            if issubclass(kind, deque):
                packed["most"] = value.maxlen
        attributes = h.attributes_of(value)
        if attributes is not None and id(attributes) in self._paths:
            packed["table"] = self.pack(attributes)  # of several objects
        elif attributes is not None:
            packed["attributes"] = [[name, self.pack(part)] for name, part in attributes.items()]
        if names := h.slots_of(kind):
            slots = zip(*h.SLOTS.read(value, names), strict=True)
            packed["slots"] = [
                [name, self.pack(part)] for name, part in slots if name not in _OF_LAYOUT
            ]
        return packed


@final
class Unpacker:
    """Restores values in a restarted program, for one examination of it."""

    def __init__(self, known: Known, device: torch.device) -> None:
        self._known, self._device = known, device
        self._made: dict[int, Any] = {}

    def unpack(self, packed: Packed) -> Any:
        """Restore a value; raises Opaque, LookupError, TypeError or ValueError."""
        if not isinstance(packed, dict):
            return packed
        mark = packed["@"]
        if mark == "at":
            return self._known.things[packed["path"]]
        if mark == "again":
            return self._made[packed["n"]]
        if mark == "model":
            return self._known.tensor(packed["name"])
        if mark == "object":
            return self._object(packed)
        made = self._value(mark, packed)
        if "n" in packed:
            self._made[packed["n"]] = made
        return made

    def _each(self, packed: list[Packed]) -> list[Any]:
        return [self.unpack(part) for part in packed]

    def _value(self, mark: str, packed: dict[str, Any]) -> Any:
        of: Any = packed.get("of")
        if mark == "weak":
            _check_callback(of)
        if mark in FORMS:
            return FORMS[mark].make(*self._each(of))
        if mark == "array":
            return self._in_memory(of)
        if mark == "id":
            return id(self.unpack(of))
        if mark == "subclass":
            return self._array(packed)
        if mark == "tensor":
            return self._tensor(packed)
        if mark == "view":
            tensor, (shape, stride, offset) = self._known.tensor(packed["name"]).detach(), of
            return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)
        if mark == "name":
            return self._known.named(packed["module"], packed["name"])
        if mark == "module":
            return self._known.module(packed["module"])
        if mark == "function":
            return self._function(packed)
        if mark == "code" and (code := self._known.code(packed["code"])) is not None:
            return code
        raise ValueError(mark)

    def _tensor(self, packed: dict[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor = self._in_memory(packed["of"])
        if not packed["host"]:
            tensor = tensor.to(self._device)
        if "class" in packed:
            kind = self.unpack(packed["class"])
            if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
                raise ValueError(kind)
            tensor = tensor.as_subclass(kind)
        elif packed["is_parameter"]:
            tensor = nn.Parameter(tensor, requires_grad=packed["needs"])
        self._made[packed["n"]] = tensor
        tensor = tensor.requires_grad_(packed["needs"]) if packed["needs"] else tensor
        if "more" in packed:
            names, values = packed["more"]
            h.put_tensor(tensor, h.GRADIENT, (tuple(names), tuple(self._each(values))))
        return tensor

    def _array(self, packed: dict[str, Any]) -> np.ndarray:
        kind: Any = self.unpack(packed["class"])
        if not (isinstance(kind, type) and issubclass(kind, np.ndarray)):
            raise ValueError(kind)
        array: np.ndarray = self.unpack(packed["of"]).view(kind)
        self._made[packed["n"]] = array
        for name, part in packed["attributes"]:
            vars(array)[name] = self.unpack(part)
        return array

    def _in_memory(self, of: Any) -> Any:
        if not isinstance(of, dict):
            return of
        memory, *part = of["of"]
        return made_in(self.unpack(memory), PartOfMemory(*part))

    def _function(self, packed: dict[str, Any]) -> types.FunctionType:
        code, of = self._known.code(packed["code"]), packed["module"]
        space = vars(sys.modules[of]) if isinstance(of, str) else self.unpack(of).__globals__
        if code is None or ("__name__" in space and is_of_a_library(space["__name__"])):
            raise Opaque(packed["code"])
        cells = tuple(map(self._cell, packed["of"]))
        made = types.FunctionType(code, space, code.co_name, None, cells)
        self._made[packed["n"]] = made  # a function may be in its own closure
        for cell, each in zip(cells, packed["of"], strict=True):
            for content in each["of"] if each["@"] == "cell" else ():
                cell.cell_contents = self.unpack(content)
        made.__qualname__ = code.co_qualname
        made.__defaults__ = self.unpack(packed["defaults"])
        made.__kwdefaults__ = self.unpack(packed["keywords"])
        made.__dict__.update(dict.items(self.unpack(packed["attributes"])))
        return made

    def _cell(self, packed: dict[str, Any]) -> types.CellType:
        if packed["@"] == "cell":
            self._made[packed["n"]] = types.CellType()
            return cast(types.CellType, self._made[packed["n"]])
        if packed["@"] == "again":
            return cast(types.CellType, self._made[packed["n"]])
        path, at = packed["of"]
        return cast(types.CellType, self._known.things[path].__closure__[at])

    def _object(self, packed: dict[str, Any]) -> Any:
        bases = {each.__name__: each for each in (*h.BASES, object)}
        base: Any = bases[packed["base"]]
        if base is object or "class" in packed:
            kind = self.unpack(packed["class"])
            if not isinstance(kind, type) or h.layout_of(kind) is not base:
                raise ValueError(kind)
        else:
            kind = base
        if base is object:  # or one with attributes that C defines, as SimpleNamespace is
            base = next(one for one in kind.__mro__ if not h.is_of_python(one))
        made = base.__new__(kind)
        self._made[packed["n"]] = made
        if base is deque:
            deque.__init__(made, self._each(packed["items"]), packed["most"])
        elif issubclass(base, dict):
            for key, part in packed["items"]:
                dict.__setitem__(made, self.unpack(key), self.unpack(part)) if base is not (
                    OrderedDict
                ) else OrderedDict.__setitem__(made, self.unpack(key), self.unpack(part))
        elif base is list:
            list.extend(made, self._each(packed["items"]))
        elif base is set:
            set.update(made, self._each(packed["items"]))
        if "table" in packed:
            made.__dict__ = self.unpack(packed["table"])
        if "attributes" in packed:
            table = h.attributes_of(made)
            assert table is not None
            for name, part in packed["attributes"]:  # another may need the hash of what is there
                table[name] = self.unpack(part)
        for name, part in packed.get("slots", ()):
            object.__setattr__(made, name, self.unpack(part))
        return made


def _check_callback(parts: Sequence[Packed]) -> None:
    """Raise Opaque unless a weak reference calls nothing, or a function with nothing bound to it.

    It calls that by itself: what is bound would be the file's choice.
    """
    callback = parts[2] if len(parts) > 2 else None
    if callback is not None and callback.get("@") not in ("at", "name"):
        raise Opaque("a weak reference with a callback that is no function of a module")


def _name_of(value: Any) -> dict[str, str]:
    return {"module": value.__module__, "name": value.__qualname__}


def number_of(packed: Packed) -> int:
    """Return a 32-bit hash of packed values, the same in every process."""
    number = 0

    def text(value: Any) -> Any:
        nonlocal number
        if isinstance(value, torch.Tensor):
            number = zlib.crc32(bytes_of(on_host(value.detach()).contiguous()), number)
            return f"{value.dtype} {tuple(value.shape)}"
        return f"{getattr(value, 'dtype', type(value))} {getattr(value, 'tobytes', str)()!r}"

    return zlib.crc32(json.dumps(packed, default=text, sort_keys=True).encode(), number)

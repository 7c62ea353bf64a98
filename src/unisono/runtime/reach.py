"""What a program's own objects lead to: generators, and the plain values that they keep.

::

    data set, loss, model ─► attributes, slots, lists, dicts, partials, closures, bound methods,
                             globals and class attributes that the program's own code names ─► …

No code of the program runs on the way: attributes are read where they lie, properties are not
asked. Nearer things come first, and so many at most; long lists, tensors and sets are not walked.
A thing is named by its way, ``dataset.transform.steps[2].rng``, the same in every process.

Generators of the program's own are seeded wherever the default ones are, each from the same word
and its own way, and put back where these are put back: what a data set's
`numpy.random.default_rng(0)` gives would depend on what this process has computed before.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

_VISITED_AT_MOST = 5_000
_LONG = 256  # entries of a list or dict
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_LEAVES = _PLAIN | {range, slice, torch.dtype, torch.Tensor, torch.nn.Parameter, np.ndarray}
_EMPTY = {dict, list, tuple, OrderedDict}
_GENERATORS = (random.Random, np.random.Generator, np.random.BitGenerator, torch.Generator)
_CACHED: Any = type(functools.lru_cache(lambda: None))
_NAMESPACES = {types.SimpleNamespace, argparse.Namespace, functools.partial, _CACHED}
_BUILTIN = type(len)
MISSING: Any = object()
"""In the place of a value: there is none."""
_OF_RUNS = (
    "unisono.training.run",
    "unisono.training.step",
    "unisono.training.trainer",
    "unisono.training.rehearsals",
    "unisono.training.callbacks",
)
_METRICS = "torchmetrics.metric"  # whose objects keep what they are called with in attributes
_OF_LIBRARIES = ("site-packages", "dist-packages")


class Holder(NamedTuple):
    """Something that holds values by name, and belongs to the program."""

    path: str
    read: Callable[[], Iterator[tuple[str, Any]]]  # the values now, each with its name
    put: Callable[[str, Any], object] | None = None  # has it hold another by name, or `MISSING`
    held: Any = None  # what holds them: a dict, a container, a class, the first cell of a closure
    kind: str = ""  # "attributes", "entries", "names" (of a class, closure or module)


class Reached(NamedTuple):
    """What was found on one walk."""

    generators: dict[str, Any]  # by the way to them; the default ones are left out
    holders: list[Holder]


def reach(roots: Mapping[str, Any]) -> Reached:
    """Walk from some objects."""
    found = Reached({}, [])
    seen = _defaults()
    ways = deque((name, root, True) for name, root in roots.items())
    while ways and len(seen) < _VISITED_AT_MOST:
        path, value, is_own = ways.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other gets its `id`
        if isinstance(value, (*_GENERATORS, np.random.RandomState)):
            if not isinstance(value, random.SystemRandom):
                found.generators[path] = value
            continue
        try:
            for holder, is_of_program in _holders(path, value, is_own=is_own):
                if is_of_program:
                    found.holders.append(holder)
                ways.extend(
                    (holder.path + name, part, is_of_program)
                    for name, part in holder.read()
                    if type(part) not in _LEAVES and (type(part) not in _EMPTY or part)
                )
        except Exception:  # whatever an object makes of being looked at, the walk goes on
            continue
    return found


def used_in(frame: types.FrameType) -> dict[str, Any]:
    """Give what the code of a frame names, by name, as far as it is there already."""
    there = {**frame.f_globals, **frame.f_locals}
    code = frame.f_code
    names = {*_names_in(code), *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return {name: there[name] for name in sorted(names & there.keys())}


def _defaults() -> dict[int, Any]:
    """Give the default generators, which are seeded in any case, by ``id``."""
    of_numpy: Any = np.random.mtrand._rand
    defaults = [random._inst, of_numpy, of_numpy._bit_generator, torch.default_generator]
    return {id(each): each for each in defaults}


def _holders(path: str, value: Any, *, is_own: bool) -> Iterator[tuple[Holder, bool]]:
    """Take a thing, found in the program's own or not, apart; and say so of each part."""
    if isinstance(value, (dict, list, tuple, deque)):
        put = functools.partial(_set_entry, value)
        yield Holder(path, functools.partial(_entries, value), put, value, "entries"), is_own
    elif isinstance(value, types.MethodType):
        yield _fixed(path, {"": value.__self__, ".__func__": value.__func__}), False
    elif isinstance(value, _BUILTIN):
        yield _fixed(path, {"": getattr(value, "__self__", None)}), False
    elif isinstance(value, functools.partial):
        parts = {"": value.func, ".args": value.args, ".keywords": value.keywords}
        yield _fixed(path, parts), is_own
    elif isinstance(value, (staticmethod, classmethod)):
        yield _fixed(path, {"": value.__func__}), False
    elif isinstance(value, property):
        yield _fixed(path, {"": value.fget}), False
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value)
        return
    elif isinstance(value, type):
        if not is_of_a_library(value.__module__):
            for each in value.__mro__:
                if not is_of_a_library(each.__module__):
                    put = functools.partial(_set_in, each)
                    named = functools.partial(_named, vars(each), None)
                    yield Holder(path, named, put, each, "names"), True
        return
    elif isinstance(value, types.ModuleType) or type(value).__module__.startswith(_OF_RUNS):
        return  # what of ours leads back to the whole program
    yield from _of_object(path, value, is_own=is_own)


def _of_function(path: str, value: types.FunctionType) -> Iterator[tuple[Holder, bool]]:
    is_own = not is_of_a_library(value.__module__)
    yield _fixed(path, {".__defaults__": value.__defaults__, "": value.__kwdefaults__}), is_own
    if value.__closure__:
        cells = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))
        read = functools.partial(_filled, cells, lambda name: cells[name].cell_contents)
        first = value.__closure__[0]

        def put_in_cell(name: str, content: Any) -> None:
            assert content is not MISSING
            cells[name[1:]].cell_contents = content

        yield Holder(path, read, put_in_cell, first, "names"), is_own
    if (attributes := attributes_of(path, value)) is not None:
        yield attributes, is_own
    if is_own:
        names = set(_names_in(value.__code__))
        spaces = {path: value.__globals__}
        for name, module in _named(value.__globals__, names):
            if isinstance(module, types.ModuleType) and not is_of_a_library(module.__name__):
                spaces[path + name] = vars(module)
        for where, there in spaces.items():
            named = functools.partial(_named, there, names)
            yield Holder(where, named, functools.partial(_set_in, there), there, "names"), True


def _of_object(path: str, value: Any, *, is_own: bool) -> Iterator[tuple[Holder, bool]]:
    """Read attributes and slots where they lie; and those of the class, if it is the program's."""
    kind: Any = type(value)
    is_own = (kind in _NAMESPACES and is_own) or not is_of_a_library(kind.__module__)
    is_own |= any(each.__module__ == _METRICS for each in kind.__mro__)
    if (attributes := attributes_of(path, value)) is not None:
        yield attributes, is_own
    if slots := _slots(kind):
        read = functools.partial(_filled, slots, functools.partial(object.__getattribute__, value))

        def put_in_slot(name: str, part: Any) -> None:
            assert part is not MISSING
            object.__setattr__(value, name[1:], part)

        yield Holder(path, read, put_in_slot), is_own
    if is_own:
        yield _fixed(path, {f".{kind.__name__}": kind}), False


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> list[str]:
    return [
        name
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for name, member in vars(each).items()
        if isinstance(member, types.MemberDescriptorType)
    ]


def attributes_of(path: str, value: Any) -> Holder | None:
    """Give what holds the attributes of an object; None if it has no dict of them."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    if not isinstance(attributes, dict):
        return None
    put = functools.partial(_set_in, attributes)
    return Holder(path, functools.partial(_named, attributes, None), put, attributes, "attributes")


def _fixed(path: str, parts: Mapping[str, Any]) -> Holder:
    return Holder(path, lambda: iter(parts.items()))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if dict.__len__(value) <= _LONG:
            for at, (key, part) in enumerate(dict.items(value)):
                # Other keys may be others in each process, as the numbers of hooks are.
                yield f"[{key!r:.40}]" if type(key) is str else f"[{at}]", part
        return
    kind: Any = next(each for each in (list, tuple, deque) if isinstance(value, each))
    if kind.__len__(value) <= _LONG:
        yield from ((f"[{at}]", part) for at, part in enumerate(kind.__iter__(value)))


def _named(namespace: Mapping[str, Any], names: set[str] | None) -> Iterator[tuple[str, Any]]:
    chosen = [*namespace] if names is None else sorted(names & namespace.keys())
    for name in chosen:
        yield f".{name}", namespace[name]


def _set_entry(container: Any, name: str, value: Any) -> None:
    if not isinstance(container, dict):
        container[int(name[1:-1])] = value
    else:
        names = {f"[{key!r:.40}]": key for key in container if type(key) is str}
        _set_in(container, f".{names[name]}", value)


def _set_in(namespace: Any, name: str, value: Any) -> None:
    if value is MISSING:
        (namespace if isinstance(namespace, dict) else {}).pop(name[1:])
    elif isinstance(namespace, type):
        setattr(namespace, name[1:], value)
    else:
        namespace[name[1:]] = value


def _filled(names: Iterable[str], get: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    for name in names:
        with suppress(AttributeError, ValueError):  # a slot or a cell that is empty yet
            yield f".{name}", get(name)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Name what a function's code may take from globals and from modules; inner functions, too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@functools.cache
def is_of_a_library(module: str | None) -> bool:
    """Tell whether a module came with Python or was installed, as far as its file says."""
    name = module or "builtins"
    if name in ("__main__", "__mp_main__"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name.startswith("unisono."):
        return True
    parts = Path(file).parts
    return any(name in parts for name in _OF_LIBRARIES) or file.startswith(
        sysconfig.get_paths()["stdlib"]
    )


class _Own(NamedTuple):
    """One generator: how it is seeded (from 64 bits), read, and put back."""

    generator: Any
    salt: int
    seed: Callable[[int], object]
    state: Callable[[], Any]
    put_back: Callable[[Any], object]


class OwnGenerators:
    """Those that some objects lead to, and all `holders`, once :meth:`look` was called. Final.

    The roots' names are the same in every process.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self.found: list[_Own] = []
        self.holders: list[Holder] = []

    def look(self) -> bool:
        """Look, maybe again; tell whether others are there than before."""
        before = [own.generator for own in self.found]
        reached = reach(self._roots)
        found = [_own(path, each) for path, each in reached.generators.items()]
        self.found = [own for own in found if own is not None]
        self.holders = reached.holders
        return before != [own.generator for own in self.found]

    def seed(self, word: int) -> None:
        """Seed all of them, each otherwise, from the 64 bits that the default ones get."""
        for own in self.found:
            own.seed(word ^ own.salt)

    def states(self) -> list[Any]:
        """Give what each of them stands at."""
        return [own.state() for own in self.found]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Leave those that are known now as they were, whatever happens."""
        states = [(own, own.state()) for own in self.found]
        try:
            yield
        finally:
            for own, state in states:
                own.put_back(state)


def _own(path: str, generator: Any) -> _Own | None:
    """Say how a generator is seeded; None if that cannot be done."""
    salt = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
    # No code of the program's: what its own classes make of `seed` is not asked.
    if isinstance(generator, random.Random):
        kind = random.Random
        calls: Any = (kind.seed, kind.getstate, kind.setstate)
        return _Own(generator, salt, *(functools.partial(call, generator) for call in calls))
    if isinstance(generator, torch.Generator):
        of_torch = generator.manual_seed, generator.get_state, generator.set_state
        return _Own(generator, salt, *of_torch)
    if isinstance(generator, np.random.RandomState):
        state = functools.partial(generator.get_state, legacy=False)
        return _Own(
            generator, salt, lambda word: generator.seed(word % 2**32), state, generator.set_state
        )
    bits: Any = getattr(generator, "bit_generator", generator)
    if type(bits).__module__.partition(".")[0] != "numpy":
        return None

    def seed(word: int) -> None:
        bits.state = type(bits)(word).state

    return _Own(
        generator, salt, seed, lambda: bits.state, lambda state: setattr(bits, "state", state)
    )

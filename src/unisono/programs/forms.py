"""Values that are rebuilt from a few parts, with a converter to and from parts for each kind.

Objects that must stay the same object (a list, an object with attributes, a function) are not here
but in ``carry.py``, which first looks through this table.
"""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import io
import itertools
import operator
import pathlib
import random
import re
import types
import weakref
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.programs import holders as h
from unisono.programs.arrays import (
    array_of,
    dtype_of,
    is_of_numbers,
    parts_of_array,
    parts_of_dtype,
)
from unisono.programs.iterators import is_frozen, iterators_rebuilt, reduced


class Opaque(Exception):
    """A value that cannot be carried; the message names its kind."""


class Form(NamedTuple):
    """One kind of value.

    Attributes:
        fits: whether a value is of this kind.
        parts: its parts, which are converted in turn.
        make: rebuilds it from the parts; raises LookupError, TypeError or ValueError.
    """

    fits: Callable[[Any], bool]
    parts: Callable[[Any], Iterable[Any]]
    make: Callable[..., Any]


_VALUES: tuple[Any, ...] = (datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
_VALUES += (datetime.datetime, decimal.Decimal, fractions.Fraction, pathlib.Path, pathlib.PurePath)
_VALUES += (range, slice, itertools.count, itertools.cycle, itertools.repeat, bytearray)
_WEAK = {one.__name__: one for one in (weakref.ref, weakref.KeyedRef, weakref.WeakMethod)}
_VALUES += (operator.itemgetter, operator.attrgetter, operator.methodcaller)
_ITERATORS: dict[str, Any] = {
    "iter": iter,
    "reversed": reversed,
    "enumerate": enumerate,
    "zip": zip,
}


def is_value(value: Any) -> bool:
    """Return whether a changed value is rebuilt, because it cannot be restored in place."""
    return is_frozen(type(value)) or isinstance(value, _VALUES)


def leads_to(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Return whether a value fits, or something in it that can only be rebuilt together with it."""
    return fits(value) or any(leads_to(part, fits) for part in _parts_within(value))


def _parts_within(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, frozenset)):
        return value
    if type(value) is functools.partial:
        return value.func, *value.args, *value.keywords.values()
    return (value.__self__,) if _is_next(value) else ()


def _is_next(value: Any) -> bool:
    """Return whether a value is the method by which an iterator advances."""
    is_bound = isinstance(value, types.MethodWrapperType) and value.__name__ == "__next__"
    return is_bound and is_frozen(type(value.__self__))


def _next(iterator: Any) -> Any:
    if not is_frozen(type(iterator)):
        raise ValueError(iterator)
    return iterator.__next__


def _exactly(kind: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _a(*kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and not h.attributes_of(value)


def _named_tuple(kind: Any, *parts: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, tuple)):
        raise ValueError(kind)
    return tuple.__new__(kind, parts)


def _is_struct_sequence(value: Any) -> bool:
    """Return whether a value is of a class such as `time.struct_time` or `torch.return_types.max`.

    Those are made in C, and may have values that have names alone.
    """
    return _makes_struct_sequences(type(value))


def _makes_struct_sequences(kind: Any) -> bool:
    if not (isinstance(kind, type) and issubclass(kind, tuple)):
        return False
    made_by = vars(kind).get("__new__")  # of C: a class of the program is never called
    return "n_sequence_fields" in vars(kind) and isinstance(made_by, types.BuiltinFunctionType)


def _struct_sequence(kind: Any, *parts: Any) -> Any:
    if not _makes_struct_sequences(kind):
        raise ValueError(kind)
    return kind(*parts)


def _in_memory_file(kind: str, content: Any, position: int) -> Any:
    made: Any = {"StringIO": io.StringIO, "BytesIO": io.BytesIO}[kind](content)
    made.seek(position)
    return made


def _member(kind: Any, name: str | int) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise ValueError(kind)
    if isinstance(name, int) and issubclass(kind, enum.Flag):
        return kind(name)
    return kind[str(name)]


def _parts_of_member(value: Any) -> tuple[Any, ...]:
    return type(value), value.name if value.name in type(value).__members__ else value.value


def _dtype(name: str) -> Any:
    if not isinstance(found := getattr(torch, name), torch.dtype):
        raise ValueError(name)
    return found


def _random(state: Any) -> random.Random:
    made = random.Random(0)
    made.setstate(state)
    return made


def _generator(state: torch.Tensor) -> torch.Generator:
    made = torch.Generator()
    made.set_state(state)
    return made


def _parts_of_bits(value: Any) -> tuple[Any, ...]:
    seeds = h.seeds_of(value)
    given = seeds and (seeds.entropy, seeds.spawn_key, seeds.pool_size, seeds.n_children_spawned)
    return type(value).__name__, value.state, given


def _bits(name: str, state: Any, seeds: Any) -> np.random.BitGenerator:
    kinds = {each.__name__: each for each in np.random.BitGenerator.__subclasses__()}
    entropy, key, size, spawned = seeds or (0, (), 4, 0)
    given: Any = {"spawn_key": key, "pool_size": size, "n_children_spawned": spawned}
    bits = kinds[name](np.random.SeedSequence(entropy, **given))
    bits.state = state
    return bits


def _legacy(state: Any) -> np.random.RandomState:
    made = np.random.RandomState(0)
    made.set_state(state)
    return made


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def _parts_of_sparse(value: Any) -> tuple[Any, ...]:
    return value._indices(), value._values(), value.shape


def _sparse(places: Any, values: Any, shape: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True)


def _parts_of_weak(value: Any) -> tuple[Any, ...]:
    callback = value.__callback__
    if isinstance(value, weakref.WeakMethod):  # its callback calls the one that it was given
        callback = inspect.getclosurevars(callback).nonlocals["callback"] if callback else None
    return value(), type(value).__name__, callback, *([value.key] if hasattr(value, "key") else [])


def _weak(to: Any, name: str = "ReferenceType", callback: Any = None, *key: Any) -> Any:
    if to is None:
        return weakref.ref(set())  # to an object that is gone
    return _WEAK[name](to, callback, *key)


def _view(name: str, of: Any) -> Any:
    return {kind.__name__: make for kind, make in h.VIEWS.items()}[name](of)


def _parts_of_value(value: Any) -> tuple[Any, ...]:
    try:
        made, arguments, *state = reduced(value)
    except TypeError:
        raise Opaque(h.name_of(type(value))) from None
    name = getattr(made, "__name__", "")
    if made is iter and len(arguments) != 1:
        raise Opaque("an iterator that calls a function")
    if _ITERATORS.get(name) is not made:
        name = _value_name(made) if isinstance(made, type) else ""
    if not name:
        raise Opaque(type(value).__name__)
    return name, *arguments, state[0] if state else None


def _value(name: str, *rest: Any) -> Any:
    make = _ITERATORS.get(name) or next((v for v in _VALUES if _value_name(v) == name), None)
    *arguments, state = rest
    if make is None or (make is iter and len(arguments) != 1):  # with two, it calls the first
        raise ValueError(name)
    value = make(*arguments)
    if state is not None:
        with iterators_rebuilt(type(value)):
            value.__setstate__(state)
    return value


def _value_name(kind: Any) -> str:
    of_paths = [each for each in (pathlib.Path, pathlib.PurePath) if issubclass(kind, each)]
    return next((str(each.__name__) for each in _VALUES if each in (kind, *of_paths)), "")


FORMS = {
    "bytes": Form(_exactly(bytes), lambda v: [v.hex()], bytes.fromhex),
    "pattern": Form(_a(re.Pattern), lambda v: [v.pattern, v.flags], re.compile),
    "constant": Form(
        lambda v: v is ... or v is NotImplemented,
        lambda v: [repr(v)],
        {"Ellipsis": ..., "NotImplemented": NotImplemented}.__getitem__,
    ),
    "numbers": Form(_exactly(array.array), lambda v: [v.typecode, v.tobytes()], array.array),
    "tuple": Form(_exactly(tuple), tuple, lambda *parts: parts),
    "frozenset": Form(_exactly(frozenset), tuple, lambda *parts: frozenset(parts)),
    "Size": Form(_exactly(torch.Size), tuple, lambda *parts: torch.Size(parts)),
    "complex": Form(_exactly(complex), lambda v: [v.real, v.imag], complex),
    "struct sequence": Form(
        _is_struct_sequence, lambda v: [type(v), *v.__reduce__()[1]], _struct_sequence
    ),
    "file": Form(
        lambda v: type(v) in (io.StringIO, io.BytesIO),
        lambda v: [type(v).__name__, v.getvalue(), v.tell()],
        _in_memory_file,
    ),
    "time zone": Form(_exactly(zoneinfo.ZoneInfo), lambda v: [v.key], zoneinfo.ZoneInfo),
    "named tuple": Form(_is_named_tuple, lambda v: [type(v), *v], _named_tuple),
    "enum": Form(_a(enum.Enum), _parts_of_member, _member),
    "dtype": Form(_a(torch.dtype), lambda v: [str(v).removeprefix("torch.")], _dtype),
    "numpy dtype": Form(_a(np.dtype), parts_of_dtype, dtype_of),
    "elements": Form(
        lambda v: type(v) is np.ndarray and not is_of_numbers(v), parts_of_array, array_of
    ),
    "scalar": Form(
        lambda v: isinstance(v, np.generic) and not is_of_numbers(np.asarray(v)),
        lambda v: [np.asarray(v)],
        operator.itemgetter(()),
    ),
    "sparse": Form(_is_sparse, _parts_of_sparse, _sparse),
    "device": Form(_a(torch.device), lambda v: [str(v)], torch.device),
    "random": Form(_exactly(random.Random), lambda v: [v.getstate()], _random),
    "generator": Form(_a(torch.Generator), lambda v: [v.get_state()], _generator),
    "bits": Form(_a(np.random.BitGenerator), _parts_of_bits, _bits),
    "drawing": Form(_a(np.random.Generator), lambda v: [v.bit_generator], np.random.Generator),
    "legacy": Form(_exactly(np.random.RandomState), lambda v: [v.get_state(legacy=False)], _legacy),
    "method": Form(_a(types.MethodType), lambda v: [v.__func__, v.__self__], types.MethodType),
    "partial": Form(
        _a(functools.partial),
        lambda v: [v.func, v.args, {**v.keywords}],  # not the dict that it has now
        lambda function, arguments, keywords: functools.partial(function, *arguments, **keywords),
    ),
    "next": Form(_is_next, lambda v: [v.__self__], _next),
    "staticmethod": Form(_a(staticmethod), lambda v: [v.__func__], staticmethod),
    "classmethod": Form(_a(classmethod), lambda v: [v.__func__], classmethod),
    "property": Form(_exactly(property), lambda v: [v.fget, v.fset, v.fdel, v.__doc__], property),
    "weak": Form(lambda v: type(v) in _WEAK.values(), _parts_of_weak, _weak),
    "view of a dict": Form(
        lambda v: type(v) in h.VIEWS, lambda v: [type(v).__name__, h.viewed(v)], _view
    ),
    "value": Form(is_value, _parts_of_value, _value),
}
"""By name; the first form that fits is used."""

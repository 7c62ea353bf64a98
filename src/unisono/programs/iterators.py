"""Builtin iterators and counters, which are rebuilt where they cannot be set to a position."""

from __future__ import annotations

import ast
import ctypes
import gc
import itertools
import sys
import warnings
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

_ITERABLES: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), "", b"", set(), range(0))
_ITERATORS: set[Any] = {type(iter(each)) for each in _ITERABLES}
_ITERATORS |= {zip, map, filter, enumerate, reversed, type(reversed([])), type(iter(deque()))}
_ITERATORS |= {type(iter(np.zeros(1))), type(iter(int, 1))}  # of a sequence, of a function


def is_iterator(value: Any) -> bool:
    """Return whether a value is a builtin iterator, or a tuple of iterators as in `zip`."""
    return is_frozen(type(value)) or type(value) is tuple


def is_frozen(kind: type) -> bool:
    """Return whether objects of a builtin class can report the parts that would rebuild them."""
    return kind in _ITERATORS or kind.__module__ == "itertools"


def parts_of(iterator: Any) -> tuple[Any, ...]:
    """Return the parts from which an iterator, a counter or the like of Python would be rebuilt."""
    parts: list[Any] = []
    try:
        for part in reduced(iterator)[1:]:
            parts.extend(part if type(part) is tuple else [part])
    except TypeError:  # what cannot be rebuilt can still be seen to change
        parts = [one for one in gc.get_referents(iterator) if one is not type(iterator)]
        parts.append(_memory_of(iterator))
    # Some return a new list of the remaining items each time.
    return tuple(tuple(part) if type(part) is list else part for part in parts)


def _memory_of(value: Any) -> bytes:
    """Copy what an object of a class in C consists of, such as positions and references."""
    start = object.__basicsize__  # before it: the class and the number of references
    return ctypes.string_at(id(value) + start, type(value).__basicsize__ - start)


def reduced(value: Any) -> tuple[Any, ...]:
    """Return how to rebuild an object, as its `__reduce__` tells (PEP 307).

    Raises TypeError if it cannot be rebuilt, as most of `itertools` since Python 3.14.
    """
    if type(value) is itertools.count and sys.hexversion >= 0x30E0000:
        return itertools.count, _arguments_of(value)
    with iterators_rebuilt(type(value)):
        return tuple(value.__reduce_ex__(4))


def _arguments_of(value: Any) -> tuple[Any, ...]:
    """Return the numbers with which an object would be made, from its text."""
    try:
        numbers = ast.literal_eval(repr(value).removeprefix(type(value).__name__))
    except (ValueError, SyntaxError) as error:
        raise TypeError(f"{value!r:.40} does not consist of numbers") from error
    return numbers if type(numbers) is tuple else (numbers,)


def iterators_rebuilt(kind: type) -> AbstractContextManager[object]:
    """Return a block in which `itertools` may be copied without a warning (Python 3.12, 3.13)."""
    if kind.__module__ != "itertools" or sys.hexversion < 0x30C0000:
        return nullcontext()
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)

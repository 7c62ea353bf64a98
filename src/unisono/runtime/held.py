"""What do objects of a program hold? Noted, to compare, and to put back.

Numbers and strings are noted as they are, tensors and arrays by a hash of their bits, sets by their
elements, other containers by their lengths, and dicts also by values under keys that ``reach.py``
does not follow. What libraries keep for themselves is not looked at.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy
import torch

from unisono.runtime.device import in_rows
from unisono.runtime.reach import MISSING, Holder

PLAIN = bool | int | float | complex | str | bytes | None
_ARRAYS = (torch.Tensor, numpy.ndarray)
_SETS = (set, frozenset)
_SEQUENCES = (list, deque)
_FILLED = (*_SEQUENCES, set, dict)
_CONTAINERS = {set, list, deque, dict, defaultdict, OrderedDict, Counter}
_TABLES = re.compile(r"\._(?:modules|buffers|parameters)\['(\w+)'\]")
_LIBRARYS = re.compile(r"\.__\w+__$|_hooks")  # what hooks count is theirs
_FEW = 4096  # entries that are noted one by one


class _Place(NamedTuple):
    """Where a value is held, and what makes it what it is."""

    holder: Holder
    name: str
    value: Any
    copy: Any  # of what it contains; None: that is not known, or there is nothing


class Held:
    """What `holders` hold now, by the way to it, without what is `apart`, by ``id``. Final.

    Of a tensor or array larger than `at_most` bytes some are hashed. Sixteen times as many bytes of
    all are looked at, and twice as many copied, for :meth:`put_back`. `values` can be compared;
    `others` are objects of other kinds.
    """

    def __init__(
        self, holders: Sequence[Holder], apart: Collection[int] = (), *, at_most: int
    ) -> None:
        self.values: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self._places: dict[str, _Place] = {}
        self._at_most, self._room, self._room_to_copy = at_most, 16 * at_most, 2 * at_most
        numbered: list[str] = []
        for holder in holders:
            table = getattr(holder.read, "args", (None,))[0]
            for name, value in holder.read():
                if isinstance(table, dict) and name[1:-1].isdigit() and name[0] == "[":
                    numbered.append(holder.path + name)
                if id(value) not in apart and not _LIBRARYS.search(holder.path + name):
                    self.note(holder, name, value)
        self._numbered = tuple(numbered)  # places in dicts, which others may have another time

    def note(self, holder: Holder, name: str, value: Any) -> None:
        """Note one value."""
        way = _TABLES.sub(r".\1", holder.path + name)
        if way in self._places:
            return  # of a base class
        with suppress(Exception):  # such as a tensor without storage
            if isinstance(value, _ARRAYS):
                self._room -= min(value.nbytes, self._at_most)
                if self._room < 0:
                    return
            noted = _noted(value, self._at_most)
            (self.others if noted is MISSING else self.values)[way] = (
                value if noted is MISSING else noted
            )
            self._places[way] = _Place(holder, name, value, self._copy(value))

    def is_plain(self, way: str) -> bool:
        """Tell whether a number or a string is held there."""
        return way in self._places and isinstance(self._places[way].value, PLAIN)

    def changed_in(self, later: Held) -> list[str]:
        """Give the ways that a later look finds to lead to other values."""
        there = later.values
        return [way for way, one in self.values.items() if way in there and one != there[way]]

    def written_in(self, later: Held) -> list[str]:
        """Give likewise those, ways that lead to something only then, and other objects."""
        ways = dict.fromkeys([*self.values, *later.values, *self.others])
        return [
            way
            for way in ways
            if not way.startswith(later._numbered) and self._is_written(way, later)
        ]

    def _is_written(self, way: str, later: Held) -> bool:
        if way in self.others or way in later.others:  # what is made at first use stays
            one, other = self.others.get(way), later.others.get(way)
            return not (one is None or other is None or one is other)
        return bool(self.values.get(way, MISSING) != later.values.get(way, MISSING))

    def differs_in(self, way: str, later: Held, *, is_alike: bool) -> bool:
        """Tell whether a way leads to another value later, beside what caches and flags do.

        `is_alike`: whether caches by the shape of a batch have had the same shapes.
        """
        one, other = self.values.get(way, MISSING), later.values.get(way, MISSING)
        if MISSING in (one, other) or one == other:
            return False
        if isinstance(one, Entries) and isinstance(other, Entries):
            return not one.fits(other)
        value = self._places[way].value
        return isinstance(value, float) or (is_alike and not isinstance(value, bool))

    def put_back(self, way: str, later: Held) -> None:
        """Have there what was there at this look, before a later one, if that can be."""
        with suppress(Exception):
            place = self._places.get(way)
            if place is None:
                place = later._places[way]._replace(value=MISSING, copy=None)
            holder, name, value, copy = place
            if copy is not None and _noted(value, self._at_most) != self.values[way]:
                fill(value, copy)
            if holder.put is not None:
                holder.put(name, value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, _ARRAYS):
            if value.nbytes > self._room_to_copy:
                return None
            self._room_to_copy -= value.nbytes
            return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
        return value.copy() if type(value) in _CONTAINERS else None


def fill(there: Any, value: Any) -> bool:
    """Have a container, a tensor or an array contain what another one does; tell if that can be."""
    kinds: list[Any] = [kind for kind in (*_FILLED, *_ARRAYS) if isinstance(there, kind)]
    are_alike = bool(kinds) and isinstance(value, kinds[0])
    if not are_alike:
        return False
    if kinds[0] in _FILLED:
        parts = value.copy()
        there.clear()
        (there.extend if kinds[0] in _SEQUENCES else there.update)(parts)
        return True
    if (there.shape, there.dtype) != (value.shape, value.dtype):
        return False
    if isinstance(there, torch.Tensor):
        there.detach().copy_(value)
    elif there.flags.writeable:
        there[...] = value
    else:
        return False
    return True


def _noted(value: Any, at_most: int) -> Any:
    """Give what tells a value from another; `MISSING` if nothing does."""
    if isinstance(value, (PLAIN, numpy.generic, itertools.count)):
        return value if isinstance(value, (str, bytes)) else repr(value)  # NaN is like NaN
    if isinstance(value, _ARRAYS):
        return hashed(value, at_most)
    if isinstance(value, _SETS):
        some = itertools.islice(value, _FEW)
        return len(value), frozenset(repr(part) for part in some if isinstance(part, PLAIN))
    if isinstance(value, tuple):
        return len(value), [repr(part) for part in value[:_FEW] if isinstance(part, PLAIN)]
    if isinstance(value, dict):
        return Entries(len(value), _values(value))
    return len(value) if isinstance(value, (*_SEQUENCES, bytearray)) else MISSING


class Entries(NamedTuple):
    """What tells one dict from another."""

    length: int
    values: Mapping[str, str]

    def fits(self, other: Entries) -> bool:
        """Tell whether what both have is the same."""
        both = self.values.keys() & other.values.keys()
        return all(self.values[key] == other.values[key] for key in both)


def _values(value: dict[Any, Any]) -> dict[str, str]:
    items = itertools.islice(dict.items(value), _FEW)
    return {
        repr(key): hashed(part)
        for key, part in items
        if isinstance(key, PLAIN) and not isinstance(key, str)
    }


def hashed(sample: Any, at_most: int = 64 * 1024) -> str:
    """Hash what a sample holds, of tensors and arrays `at_most` bytes each, evenly taken.

    Of objects of unknown classes no more than the class counts.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest.update, sample, at_most)
    return digest.hexdigest()


def _add(update: Callable[[bytes], object], value: Any, at_most: int) -> None:
    update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.layout == torch.strided:
            flat = value.detach().reshape(-1)
            update(_told(in_rows(flat[:: _stride(flat.numel() * flat.itemsize, at_most)])))
    elif isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        update(f"{array.dtype} {array.shape}".encode())
        if not array.dtype.hasobject:
            update(_told(array.reshape(-1)[:: _stride(array.nbytes, at_most)].tobytes()))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            update(repr(key).encode())
            _add(update, part, at_most)
    elif isinstance(value, (list, tuple)):
        update(str(len(value)).encode())
        for part in value[:: _stride(8 * len(value), at_most)]:
            _add(update, part, at_most)
    elif isinstance(value, (str, bytes)):
        update(value.encode(errors="replace") if isinstance(value, str) else value)
    elif isinstance(value, (bool, int, float, complex)):
        update(repr(value).encode())


def _told(data: bytes | memoryview) -> bytes:
    """Shorten what a digest would take long for."""
    return bytes(data) if len(data) <= 1 << 16 else zlib.crc32(data).to_bytes(4, "little")


def _stride(num_bytes: int, at_most: int) -> int:
    return num_bytes // at_most + 1

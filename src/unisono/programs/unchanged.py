"""Which of many places are as they were? Hundreds are compared at once, by identity.

Most of what a program leads to never changes: rows of a table, nodes of a graph. Reading such
places one by one takes a microsecond each, dozens of times in a step that is rehearsed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple, final

from unisono.programs import holders as h
from unisono.programs.holders import Content, Holder

_TOGETHER = 256  # places; one that has changed makes all of these be read


class _Group(NamedTuple):
    """Places of one kind, with their names and values one after the other."""

    kind: h.Kind
    owners: list[Any]
    tables: list[Any]  # the dicts or lists with the values
    classes: list[type]
    sizes: list[int]
    names: list[Any]
    values: list[Any]

    def is_same(self) -> bool:
        """Return whether all places have the same names and objects."""
        tables = self.tables
        is_of_objects = self.kind is h.ATTRIBUTES
        if is_of_objects and not _are(_tables_of(self.owners), tables):
            return False
        if is_of_objects and not _are(map(type, self.owners), self.classes):
            return False
        if [*map(len, tables)] != self.sizes:
            return False
        if self.kind is h.ITEMS:
            return _are(chain.from_iterable(tables), self.values)
        there = chain.from_iterable(map(dict.values, tables))
        return _are(there, self.values) and _are(chain.from_iterable(tables), self.names)


@final
class Unchanged:
    """Which of the `places`, by key, may have changed since they had these contents?"""

    def __init__(self, places: Mapping[str, tuple[Holder, Content]]) -> None:
        grouped: dict[str, list[str]] = defaultdict(list)
        self._alone: list[str] = []
        for key, (holder, content) in places.items():
            (grouped[holder.kind.name] if _fits(holder, content) else self._alone).append(key)
        self._groups = [
            (keys[at : at + _TOGETHER], _group([places[key] for key in keys[at : at + _TOGETHER]]))
            for keys in grouped.values()
            for at in range(0, len(keys), _TOGETHER)
        ]

    def renewed(
        self, places: Mapping[str, tuple[Holder, Content]], read: Collection[str]
    ) -> Unchanged:
        """Return the same for new contents of those places that were `read` again."""
        is_read = {*read}.__contains__
        read_again = [keys for keys, _ in self._groups if is_read(keys[0])]
        found = Unchanged({key: places[key] for keys in read_again for key in keys})
        found._alone += self._alone
        found._groups += [one for one in self._groups if not is_read(one[0][0])]
        return found

    def rest(self) -> Iterator[str]:
        """Yield the keys of all places except those that are certainly the same."""
        yield from self._alone
        for keys, group in self._groups:
            try:
                is_same = group.is_same()
            except (RuntimeError, AttributeError):  # changed by a thread; has lost its `__dict__`
                is_same = False
            if not is_same:
                yield from keys


def _fits(holder: Holder, content: Content) -> bool:
    if holder.kind is h.ATTRIBUTES:
        if isinstance(holder.owner, threading.local):  # has a dict for each thread
            return False
        return not holder.names and type(h.attributes_of(holder.owner)) is dict
    kind: Any = {h.ENTRIES: dict, h.ITEMS: list}.get(holder.kind)
    return type(holder.owner) is kind and len(holder.owner) == len(content[1])


def _group(places: list[tuple[Holder, Content]]) -> _Group:
    kind, owners = places[0][0].kind, [holder.owner for holder, _ in places]
    contents = [content for _, content in places]
    if kind is not h.ATTRIBUTES:
        names, values = ([*chain.from_iterable(each)] for each in zip(*contents, strict=True))
        sizes = [len(there) for _, there in contents]
        return _Group(kind, owners, owners, [], sizes, names, values)
    names = [*chain.from_iterable(names[:-1] for names, _ in contents)]  # without the class
    values = [*chain.from_iterable(values[:-1] for _, values in contents)]
    classes = [values[-1] for _, values in contents]
    sizes = [len(there) - 1 for _, there in contents]
    return _Group(kind, owners, [*_tables_of(owners)], classes, sizes, names, values)


def _tables_of(owners: list[Any]) -> Iterator[Any]:
    return map(object.__getattribute__, owners, repeat("__dict__"))


def _are(some: Iterator[Any], others: list[Any]) -> bool:
    return all(map(is_, some, others))

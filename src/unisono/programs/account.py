"""What places of a program hold at one moment, to see later what has changed, and put it back."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from unisono.programs import holders as h
from unisono.programs.holders import Content, Holder

_COPIED = 1 << 20
"""Bytes of a tensor or an array that is copied, to be put back."""
_COPIED_IN_ALL = 32 << 20


class ChangedPlace(NamedTuple):
    """A place whose content differs, and the values in it that do."""

    holder: Holder
    slots: Sequence[Any]

    @property
    def paths(self) -> list[str]:
        """The paths to the values."""
        return [self.holder.shown(slot) for slot in self.slots]

    def numbers(self) -> list[str]:
        """Return the paths to numbers and tensors among them that are the program's own."""
        if self.holder.is_of_library:
            return []
        there = dict(h.numbered(self.holder.read()))
        slots = [s for s in self.slots if isinstance(there.get(s), (int, float, *h.ARRAYS))]
        if self.holder.kind is h.CONTENTS or (slots and self.holder.kind is h.ITEMS):
            return [self.holder.path]
        return [self.holder.shown(slot) for slot in slots]


@final
class Account:
    """The contents of some places now.

    Args:
        holders: the places.
        copies: whether tensors and arrays are copied, so that they can be put back.
        apart: identities of values that do not count, such as a model's buffers.
    """

    def __init__(
        self, holders: Sequence[Holder], *, copies: bool = True, apart: Collection[int] = ()
    ) -> None:
        self._then: dict[str, tuple[Holder, Content]] = {}
        self._copies: dict[str, Any] = {}
        self._apart = apart
        room = _COPIED_IN_ALL if copies else 0
        for holder in holders:
            if id(holder.owner) in apart or holder.kind in (h.DRAWN, h.POSITION):
                continue
            with suppress(Exception):  # such as a tensor without storage
                self._then[holder.key] = holder, holder.read()
                if holder.kind is h.CONTENTS and holder.owner.nbytes <= min(_COPIED, room):
                    room -= holder.owner.nbytes
                    self._copies[holder.key] = _copied(holder.owner)

    @property
    def holders(self) -> list[Holder]:
        """The places."""
        return [holder for holder, _ in self._then.values()]

    def content(self, holder: Holder) -> Content | None:
        """Return what a place held; None if it was not known."""
        found = self._then.get(holder.key)
        return None if found is None else found[1]

    def copy(self, holder: Holder) -> Any:
        """Return a copy of a tensor or an array; None if there is none."""
        return self._copies.get(holder.key)

    def changes(self) -> list[ChangedPlace]:
        """Compare with what the places hold now."""
        return list(self._changes())

    def _changes(self) -> Iterator[ChangedPlace]:
        for holder, then in self._then.values():
            with suppress(Exception):
                now = holder.read()
                if not h.same(then, now) and (slots := self._counted(then, now)):
                    yield ChangedPlace(holder, slots)

    def _counted(self, then: Content, now: Content) -> list[Any]:
        """Return what differs, without values that do not count."""
        if not self._apart:
            return h.changed_slots(then, now)
        values = [
            dict(zip(names, there, strict=True)) if names else {} for names, there in (then, now)
        ]
        return [
            slot
            for slot in h.changed_slots(then, now)
            if not any(id(each.get(slot)) in self._apart for each in values)
        ]

    def put_back(self, only: Callable[[Holder], bool] = lambda holder: True) -> None:
        """Have the places hold what they held, where that can be done."""
        for key, (holder, then) in self._then.items():
            if not only(holder):
                continue
            with suppress(Exception):
                if h.same(then, holder.read()):
                    continue
                if holder.kind is h.CONTENTS:
                    if key in self._copies:
                        fill(holder.owner, self._copies[key])
                else:
                    holder.put(then)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


def fill(there: Any, value: Any) -> None:
    """Copy the elements of a tensor or an array into another one."""
    if isinstance(there, torch.Tensor):
        with torch.no_grad():  # `detach` makes a sparse tensor another one
            there.copy_(value)
    elif isinstance(there, np.ndarray):
        there[...] = value


def over_memory_of(state: Iterable[torch.Tensor], holders: Iterable[Holder]) -> set[int]:
    """Return the identities of tensors and arrays that lie in memory of a model's tensors."""
    storages = [each.untyped_storage() for each in state if _has_memory(each)]
    return _within(
        {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}, holders
    )


def over_shared_memory(holders: Iterable[Holder]) -> set[int]:
    """Return the identities of what lies in memory that other processes may write to.

    Source: proc_pid_maps(5); on a system without, nothing is found.
    """
    spans = set()
    with suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            span, may = line.split(maxsplit=2)[:2]
            if may[3] == "s":
                begin, end = (int(each, 16) for each in span.split("-"))
                spans.add((begin, end))
    return _within(spans, holders)


def _within(spans: Collection[tuple[int, int]], holders: Iterable[Holder]) -> set[int]:
    ordered = sorted(spans)
    found = set()
    for holder in holders:
        if holder.kind in (h.CONTENTS, h.BYTES, h.MADE_IN_C):
            address = _address(holder.owner)
            at = bisect.bisect(ordered, (address, math.inf)) - 1
            if at >= 0 and address < ordered[at][1]:
                found.add(id(holder.owner))
    return found


def _address(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr() if _has_memory(value) else 0
    if isinstance(value, torch.UntypedStorage):
        return value.data_ptr()
    with suppress(ValueError, TypeError):  # such as an `mmap` that was closed
        there = value if isinstance(value, np.ndarray) else np.frombuffer(value, np.uint8)
        return int(there.__array_interface__["data"][0])
    return 0


def _has_memory(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout is torch.strided

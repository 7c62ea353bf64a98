"""The contents of a program's places at one moment, to detect later changes and to undo them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from unisono.programs import holders as h
from unisono.programs.arrays import elements
from unisono.programs.hashes import hashed
from unisono.programs.holders import Content, Holder
from unisono.programs.unchanged import Unchanged
from unisono.runtime.device import bits_of, is_on_host

_COPIED = 1 << 20
"""Tensors and arrays of up to this many bytes are copied, so that they can be restored."""
_COPIED_IN_ALL = 32 << 20


class ChangedPlace(NamedTuple):
    """A place whose content differs, and the names of the changed values."""

    holder: Holder
    slots: Sequence[Any]

    @property
    def paths(self) -> list[str]:
        """The paths to the values."""
        return [self.holder.shown(slot) for slot in self.slots]

    def numbers(self, then: Content | None = None) -> list[str]:
        """Return the paths to changed numbers and tensors, unless the place is a library's.

        Of those that equal what was there `then`, none.
        """
        if self.holder.is_of_library:
            return []
        there, before = dict(h.numbered(self.holder.read())), dict(h.numbered(then or ((), ())))
        slots = [
            slot
            for slot in self.slots
            if isinstance(there.get(slot), (int, float, *h.ARRAYS))
            and hashed(there[slot]) != hashed(before.get(slot))
        ]
        if self.holder.kind is h.CONTENTS or (slots and self.holder.kind is h.ITEMS):
            return [self.holder.path]
        return [self.holder.shown(slot) for slot in slots]


@final
class Account:
    """The contents of some places at this moment.

    Args:
        holders: the places.
        copies: whether to copy tensors and arrays, so that they can be restored.
        apart: identities of values to ignore, such as a model's buffers.
        like: an earlier account; if it has all the same places, only some are read again.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        *,
        copies: bool = True,
        apart: Collection[int] = (),
        like: Account | None = None,
    ) -> None:
        self._then: dict[str, tuple[Holder, Content]] = {}
        self._copies: dict[str, Any] = {}
        self._apart, self._walked, self._has_all = apart, holders, True
        room = _COPIED_IN_ALL if copies else 0
        is_alike = like is not None and like._walked is holders and like._apart == apart
        if like is None or not (is_alike and like._has_all):
            self._read(holders, room)
            return
        rest = like._rest()
        self._then.update(like._then)
        self._copies.update((key, like._copies[key]) for key in like._copies.keys() - {*rest})
        room -= sum(copy.nbytes for copy in self._copies.values())
        self._read([like._then[key][0] for key in rest], room)
        self._unchanged = like._unchanged.renewed(self._then, rest)

    @cached_property
    def _unchanged(self) -> Unchanged:
        return Unchanged(self._then)

    def _read(self, holders: Iterable[Holder], room: int) -> None:
        for holder in holders:
            if id(holder.owner) in self._apart or holder.kind in (h.DRAWN, h.POSITION):
                continue
            try:
                self._then[holder.key] = holder, holder.read()
                if holder.kind is h.CONTENTS and holder.owner.nbytes <= min(_COPIED, room):
                    room -= holder.owner.nbytes
                    self._copies[holder.key] = cloned(holder.owner)
            except Exception:  # such as a tensor without storage, which it may have later
                self._has_all = False

    @property
    def holders(self) -> list[Holder]:
        """The places."""
        return [holder for holder, _ in self._then.values()]

    def content(self, holder: Holder) -> Content | None:
        """Return what a place held; None if it was unknown."""
        found = self._then.get(holder.key)
        return None if found is None else found[1]

    def copy(self, holder: Holder) -> Any:
        """Return the copy of a tensor or an array; None if there is none."""
        return self._copies.get(holder.key)

    def changes(self) -> list[ChangedPlace]:
        """Return the places whose contents have changed."""
        return list(self._changes())

    def _rest(self) -> list[str]:
        """Return the keys of all places but those that have certainly not changed."""
        rest = {*self._unchanged.rest()}
        return [
            key
            for key, (holder, _) in self._then.items()  # nearer places first
            if key in rest and not has_bits_of(holder.owner, self._copies.get(key))
        ]

    def _changes(self) -> Iterator[ChangedPlace]:
        for key in self._rest():
            holder, then = self._then[key]
            with suppress(Exception):
                now = holder.read()
                if not h.same(then, now) and (slots := self._counted(then, now)):
                    yield ChangedPlace(holder, slots)

    def _counted(self, then: Content, now: Content) -> list[Any]:
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
        """Restore the contents of the places, where possible."""
        for key in self._rest():
            holder, then = self._then[key]
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

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore within a block what can be, and afterwards what was there before the block."""
        now = Account(self.holders, apart=self._apart)

        def can_return(holder: Holder) -> bool:
            is_kept = holder.kind is not h.CONTENTS or now.copy(holder) is not None
            return is_kept and holder.can_go_back_and_forth

        self.put_back(can_return)
        try:
            yield
        finally:
            now.put_back()


def has_bits_of(value: Any, copy: Any) -> bool:
    """Return whether a tensor or an array has the bits of its copy, if that is quick to find."""
    if type(value) is not type(copy) or type(value) not in h.ARRAYS:
        return False
    with suppress(Exception):  # such as a sparse or quantized tensor, which has no bits of its own
        if (value.shape, value.dtype) != (copy.shape, copy.dtype):
            return False
        if isinstance(value, np.ndarray):
            return not value.dtype.hasobject and np.array_equal(_bytes(value), _bytes(copy))
        needs = value.is_leaf and value.requires_grad
        is_plain = is_on_host(value) and not (value.is_neg() or value.is_quantized)
        is_same = needs is copy.requires_grad and is_plain
        return is_same and torch.equal(bits_of(value.detach()), bits_of(copy.detach()))
    return False


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)


def cloned(value: Any) -> Any:
    """Return a copy of a tensor or an array."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_leaf and value.requires_grad)
    return value.copy()


def fill(there: Any, value: Any) -> None:
    """Copy the elements of a tensor or an array into another one."""
    if isinstance(there, torch.Tensor):
        with torch.no_grad():  # `detach` changes a sparse tensor
            if (there.shape, there.dtype) == (value.shape, value.dtype):
                there.copy_(value)
            else:  # cast or cut by the program
                there.data = value.to(there.device, copy=True)
    elif isinstance(there, np.ndarray):
        if there.shape != value.shape:
            there.resize(value.shape, refcheck=False)
        elements(there)[...] = elements(value)


def over_memory_of(state: Iterable[torch.Tensor], holders: Iterable[Holder]) -> set[int]:
    """Return the identities of tensors and arrays in memory of a model's tensors."""
    storages = [each.untyped_storage() for each in state if _has_memory(each)]
    return _within(
        {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}, holders
    )


def over_shared_memory(holders: Iterable[Holder]) -> set[int]:
    """Return the identities of objects in memory that other processes may write to.

    Source: proc_pid_maps(5); on a system without it, nothing is found.
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
    # Such as an `mmap` that was closed, or a tensor that is made of others.
    with suppress(RuntimeError, TypeError, ValueError):
        if isinstance(value, torch.Tensor):
            return value.untyped_storage().data_ptr() if _has_memory(value) else 0
        if isinstance(value, torch.UntypedStorage):
            return value.data_ptr()
        there = value if isinstance(value, np.ndarray) else np.frombuffer(value, np.uint8)
        return int(there.__array_interface__["data"][0])
    return 0


def _has_memory(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout is torch.strided

"""Does a computation depend on earlier computations? Repeat it, and compare.

For shards, models, whole batches, samples and `on_gradients`, from the program's state::

    as it began ─► this                           what is known
    as it is left then ─► this again              a counter, a running mean, a list that grows
    as it began ─► something else ─► this         the first value of each sample, a scale that the
                                                  first sample sets, noise that is drawn once
    with what grows set further ─► this again     what only begins after a while
    as the first one began ─► this                what an unseen computation has kept since

All must give the same result. State that is only stored, or that is the same for any computation
that stores it first (a cache, a file that is opened once), makes no difference and is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.programs import holders as h
from unisono.programs.account import Account, ChangedPlace
from unisono.programs.holders import Content, Holder
from unisono.programs.settings import PLAIN

Seen = Mapping[str, Any]
"""The results of a computation, by name; empty if it raised."""

_FURTHER = (10, 1000, 100_000)
"""How far counters are advanced."""


class Dependence(NamedTuple):
    """Why a computation is not a function of its inputs."""

    path: str  # to the stored value; empty if unknown
    differs: str  # the result that differed
    is_of_rank: bool = False  # the computation reads the rank of its worker
    is_plain: bool = False  # the stored value is a number or a string
    after: str = ""  # the other computation that stored the value


class Rehearsal(NamedTuple):
    """One computation, and how to repeat it.

    Attributes:
        look: returns an account of the program's current state.
        again: computes it again, from the state at that time.
        elsewhere: computes it again as another worker.
        others: by name, other computations; each is tried before this one.
        written: places that this computation was seen to write to, now or earlier.
        grows: receives an account and the places that have changed again since.
    """

    look: Callable[[], Account]
    again: Callable[[], Seen]
    written: set[tuple[int, str]]
    elsewhere: Callable[[], Seen] | None = None
    others: Mapping[str, Callable[[], object]] = MappingProxyType({})
    grows: Callable[[Account, Sequence[ChangedPlace]], object] = lambda left, grown: None

    def judge(self, begun: Sequence[Account], known: Seen) -> Dependence | None:
        """Return a dependence, or None; leaves the program's state unchanged.

        `begun`: the program's state before this computation, and at earlier moments.
        """
        self.written.update(change.holder.identity for change in begun[0].changes())
        since = [change for before in begun[1:] for change in before.changes()]
        left = self.look() if self.written or since else begun[0]
        holders = {each.key: each for account in begun for each in account.holders}
        written = [each for each in holders.values() if each.identity in self.written]
        try:
            finding = self._judge(begun, known, left, written)
            return finding or self._judge_since(begun[1:], known, left)
        finally:
            left.put_back()

    def _judge(
        self, begun: Sequence[Account], known: Seen, left: Account, written: Sequence[Holder]
    ) -> Dependence | None:
        seen = (self.elsewhere or self.again)()
        if differs := difference(known, seen):
            if self.elsewhere and not difference(known, self._from(left)):
                return Dependence("", differs, is_of_rank=True)
            late = [change.holder for change in left.changes()]  # what it writes to only now
            return self._culprit([*written, *late], begun[0], left, known, differs)
        if not written:
            return None
        changes = left.changes()
        self.grows(left, changes)
        grown = [change.holder for change in changes]
        for before in begun:
            for name in self.others:
                if differs := self._after(name, before, left):
                    return self._culprit(written, before, left, known, differs, name)
        for more in _FURTHER if grown else ():
            left.put_back()
            for holder in grown:
                set_further(holder, more)
            seen = self.again()
            if seen and (differs := difference(known, seen)):
                return self._further_culprit(grown, left, known, differs, more)
        return None

    def _judge_since(
        self, begun: Sequence[Account], known: Seen, left: Account
    ) -> Dependence | None:
        """Find what this depends on among all that has changed since earlier moments.

        Computations that were not judged may have written it, or code between computations.
        """
        other = next(iter(self.others.values()), None)
        for before in begun:
            changed = [change.holder for change in before.changes()]
            if other is None or all(map(self._is_written, changed)):
                continue
            left.put_back()
            alone = self._from_then(before)
            if not difference(known, alone):
                continue
            if difference(alone, self._from_then(before)):  # generators that no longer count
                continue
            if differs := difference(alone, self._from_then(before, other)):
                culprits = (
                    each
                    for each in changed
                    if not difference(alone, self._from_then(before, other, [each]))
                )
                return _finding(next(culprits, changed[0]), before, left, differs)
        return None

    def _from_then(
        self,
        before: Account,
        other: Callable[[], object] = lambda: None,
        put_back: Sequence[Holder] = (),
    ) -> Seen:
        """Compute this from an earlier state, after another computation; some places restored."""
        with before.restored():
            with suppress(Exception):
                other()
            for holder in put_back:
                before.put_back(partial(is_same, holder))
            return self.again()

    def _is_written(self, holder: Holder) -> bool:
        return holder.identity in self.written

    def _from(self, account: Account) -> Seen:
        account.put_back()
        return self.again()

    def _after(self, name: str, before: Account, left: Account) -> str | None:
        """Return the difference between this computed alone, and after another computation."""
        self._begin(before, left)
        alone = self.again()
        self._begin(before, left, name)
        return difference(alone, self.again())

    def _begin(self, before: Account, left: Account, name: str = "") -> None:
        left.put_back()
        before.put_back(self._is_written)
        with suppress(Exception):
            if name:
                self.others[name]()

    def _culprit(
        self,
        written: Sequence[Holder],
        before: Account,
        left: Account,
        known: Seen,
        differs: str,
        after: str = "",
    ) -> Dependence:
        """Return the place that makes the difference when only that place is restored."""
        for holder in written:
            if after:
                self._begin(before, left, after)
            else:
                left.put_back()
                self.again()
            before.put_back(partial(is_same, holder))
            if not difference(known, self.again()):
                return _finding(holder, before, left, differs)._replace(after=after)
        unsure = [each for each in written if after or not each.can_be_put_back]
        if not unsure:
            return Dependence("", differs)
        return _finding(unsure[0], before, left, differs)._replace(after=after)

    def _further_culprit(
        self, grown: Sequence[Holder], left: Account, known: Seen, differs: str, more: int
    ) -> Dependence:
        for holder in grown:
            left.put_back()
            set_further(holder, more)
            if difference(known, self.again()):
                return _finding(holder, None, left, differs)
        return _finding(grown[0], None, left, differs)


def is_same(one: Holder, other: Holder) -> bool:
    """Return whether two accounts have these as one place."""
    return one.key == other.key


def carried(before: Account, left: Account, differs: str) -> Dependence:
    """Return a changed place as a dependence, where no computation can be repeated."""
    changes = before.changes()
    changed = [change for change in changes if left.content(change.holder) is not None]
    nothing: Content = (), ()
    for change in sorted(changed, key=lambda one: one.holder.kind is h.CONTENTS):
        then, now = before.content(change.holder), left.content(change.holder)
        if not h.same(then or nothing, now or nothing):
            return _finding(change.holder, before, left, differs)
    return Dependence("", differs)


def _finding(holder: Holder, before: Account | None, left: Account, differs: str) -> Dependence:
    now = left.content(holder) or holder.read()
    then = holder.read() if before is None else before.content(holder)
    slots = h.changed_slots(then, now) if then is not None else []
    if not slots:
        return Dependence(holder.path, differs)
    values = dict(zip(*now, strict=True)) if now[0] else dict(enumerate(now[1]))
    is_plain = type(values.get(slots[0])) in PLAIN and holder.kind is not h.CONTENTS
    return Dependence(holder.shown(slots[0]), differs, is_plain=is_plain)


def difference(one: Seen, other: Seen) -> str | None:
    """Return a name that both have with different values; None if there is none."""
    return next((name for name in one if name in other and one[name] != other[name]), None)


def set_further(holder: Holder, more: int) -> None:
    """Advance the numbers in a place as further computations might."""
    with suppress(Exception):
        if holder.kind is h.CONTENTS:
            _set_array_further(holder.owner, more)
            return
        names, values = holder.read()
        holder.put((names, tuple(_further(value, more) for value in values)))


def _further(value: Any, more: int) -> Any:
    if type(value) is int:
        return value + more
    return value * more if type(value) is float else value


def _set_array_further(value: Any, more: int) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        is_floating = value.dtype.is_floating_point or value.dtype.is_complex
    else:
        is_floating = np.issubdtype(value.dtype, np.inexact)
    if is_floating:
        value *= more
    else:
        value += more

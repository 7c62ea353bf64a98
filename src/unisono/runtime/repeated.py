"""Does what is computed depend on what was computed before? Compute it twice, and compare.

For samples (``second_reading.py``), shards and models (``rehearsals.py``) alike. In a row, from
the same inputs and random numbers::

    computed ─► look ─► computed again ─► look

What differs then goes on from one to the next; what was only stored is the same. But what the first
one has left (the least loss so far, samples seen, what was drawn) may be the same when it comes
again. So what was written is put back, and two are computed in both orders::

    as it began ─► one ─► other      each must come to the same, and leave the same behind,
    as it began ─► other ─► one      as without the other before it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from unisono.runtime.held import Held

Seen = Mapping[str, Any]
"""By name, what a computation has come to."""

Look = Callable[[], Held]
"""Looks at what the program keeps now."""


def difference(one: Seen, other: Seen) -> str | None:
    """Name something that is not the same in both, of what both have."""
    return next((name for name in one if name in other and one[name] != other[name]), None)


def what_goes_on(first: Held, look: Look, again: Callable[[], object]) -> str | None:
    """Name what has changed from one computation to the next, and does so each time.

    `first` is between them; the second one has just ended; `again` computes the same once more.
    """
    second = look()
    ways = first.changed_in(second)
    if not ways:
        return None
    again()
    third = look()  # a cache that was full may have been emptied once
    ways = [way for way in ways if third.values.get(way) != second.values[way]]
    for way in first.written_in(third):
        first.put_back(way, third)
    there = look()
    for way in ways:
        if there.values.get(way) != first.values[way]:
            return way  # it cannot be put back
    again()
    fourth = look()
    # From the same value to the same again: else it is a time that is kept.
    return next((way for way in ways if fourth.values.get(way) == second.values[way]), None)


class Orders(NamedTuple):
    """Two computations, in both orders, and what the program may have kept of them. Final."""

    begun: Held  # before either
    ways: Sequence[str]  # that were written since
    look: Look
    is_alike: bool  # the inputs of both have the same shapes

    def what_goes_on(
        self, one: Callable[[], Seen], other: Callable[[], Seen], known: Seen
    ) -> str | None:
        """Name what goes on from one computation to another; what is kept stays as it is now.

        Each gives what it comes to; `known` is what the other one comes to now.
        """
        now = self.look()
        try:
            (one_first, left_by_one), (other_second, left_by_both) = self._computed(now, one, other)
            (other_first, left_by_other), (one_second, left_by_all) = self._computed(
                now, other, one
            )
            for alone, after, compute in (
                (left_by_other, left_by_both, other),
                (left_by_one, left_by_all, one),
            ):
                if way := self._left(alone, after, now, compute):
                    return way
            pairs = (one_first, one_second), (other_first, other_second), (other_first, known)
            if not any(difference(*pair) for pair in pairs):
                return None
            self._put_back(now, now)
            return culprit(self.ways, self.begun, now, lambda: bool(difference(other(), known)))
        finally:
            self._put_back(now, now)

    def _computed(self, now: Held, *computations: Callable[[], Seen]) -> list[tuple[Seen, Held]]:
        """Compute from what was kept as it began."""
        self._put_back(self.begun, now)
        return [(compute(), self.look()) for compute in computations]

    def _put_back(self, to: Held, now: Held) -> None:
        for way in self.ways:
            to.put_back(way, now)

    def _left(self, alone: Held, after: Held, now: Held, compute: Callable[[], Seen]) -> str | None:
        """Name what is another after one computation if another one came before it."""
        ways = [way for way in self.ways if alone.differs_in(way, after, is_alike=self.is_alike)]
        if not ways:
            return None
        ((_, again),) = self._computed(now, compute)  # a time is another one each time
        return next((way for way in ways if alone.values[way] == again.values.get(way)), None)


def culprit(ways: Sequence[str], before: Held, now: Held, is_it: Callable[[], bool]) -> str:
    """Find what makes a difference when it alone is what it was before."""
    for way in ways:
        before.put_back(way, now)
        try:
            if is_it():
                return way
        finally:
            for each in ways:
                now.put_back(each, now)
    return "`, `".join(ways[:3])

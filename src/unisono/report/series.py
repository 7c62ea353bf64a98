"""How is a long row of numbers kept small? As means, least and greatest values of its stretches.

However many values come, at most ``max_buckets`` stretches are kept: when they are full, each two
neighbours become one, and each new one takes twice as many values. ::

    1 2 3 4 │ 5      ─►  12 34 5·      ─►  12 34 56 78 │ 9      ─►  1234 5678 9···
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Absorbing(Protocol):
    """What is kept of some neighbouring steps."""

    def absorb(self, later: Any, /) -> None:
        """Take in the stretch that follows this one."""


S = TypeVar("S", bound=Absorbing)


class Buckets(Generic[S]):
    """Stretches of equally many values each, but for the last one.

    Attributes:
        width: how many values each takes.
        stretches: the stretches, first to last.
    """

    def __init__(self, max_buckets: int) -> None:
        assert max_buckets >= 2
        self._max = max_buckets
        self._num_in_last = 0
        self.width = 1
        self.stretches: list[S] = []

    def add(self, one: S) -> None:
        """Add the stretch of a single value."""
        if self.stretches and self._num_in_last < self.width:
            self.stretches[-1].absorb(one)
            self._num_in_last += 1
            return
        if len(self.stretches) == self._max:
            self._halve()
            self.add(one)
            return
        self.stretches.append(one)
        self._num_in_last = 1

    def _halve(self) -> None:
        self._num_in_last = self.width * (2 - len(self.stretches) % 2)
        for one, next_one in zip(self.stretches[::2], self.stretches[1::2], strict=False):
            one.absorb(next_one)
        del self.stretches[1::2]
        self.width *= 2


@dataclass(slots=True)
class Values:
    """The values of some neighbouring steps; those that are not finite are only counted."""

    first_step: int
    last_step: int
    total: float
    weight: float
    low: float
    high: float
    num_not_finite: int

    def absorb(self, later: Values, /) -> None:
        """Take in the values that follow."""
        self.last_step = later.last_step
        self.total += later.total
        self.weight += later.weight
        self.low = min(self.low, later.low)
        self.high = max(self.high, later.high)
        self.num_not_finite += later.num_not_finite

    @property
    def mean(self) -> float | None:
        """The mean of the finite ones, each with its weight; None if there are none."""
        return self.total / self.weight if self.weight > 0 else None

    @property
    def middle_step(self) -> float:
        """Where the stretch is drawn."""
        return (self.first_step + self.last_step) / 2


class Series:
    """A number a step, kept small. Final.

    Attributes:
        buckets: what is kept, first to last.
        last: the last value, which may be NaN or infinite; None before the first.
        last_step: the step that it belongs to.
        first_not_finite: the first step whose value was not finite, or None.
    """

    def __init__(self, max_buckets: int = 800) -> None:
        self.buckets: Buckets[Values] = Buckets(max_buckets)
        self.last: float | None = None
        self.last_step: int | None = None
        self.first_not_finite: int | None = None

    @property
    def values(self) -> list[Values]:
        """What is kept, first to last."""
        return self.buckets.stretches

    def add(self, step: int, value: float, weight: float = 1.0) -> None:
        """Add a step's value; its weight counts in means."""
        self.last, self.last_step = value, step
        if math.isfinite(value):
            one = Values(step, step, value * weight, weight, value, value, 0)
        else:
            one = Values(step, step, 0.0, 0.0, math.inf, -math.inf, 1)
            if self.first_not_finite is None:
                self.first_not_finite = step
        self.buckets.add(one)


def smoothed(means: list[float | None], reach: int) -> list[float | None]:
    """Return at each place the mean over the places at most ``reach`` away that have a value."""
    totals, counts = [0.0], [0]
    for mean in means:
        totals.append(totals[-1] + (mean or 0.0))
        counts.append(counts[-1] + (mean is not None))
    result: list[float | None] = []
    for i, mean in enumerate(means):
        low, high = max(0, i - reach), min(len(means), i + reach + 1)
        count = counts[high] - counts[low]
        result.append(None if mean is None else (totals[high] - totals[low]) / count)
    return result

"""How is a long row of numbers kept small? As means of its stretches.

However many values come, at most ``max_stretches`` are kept: when there are as many, each two
neighbours become one, and each new one takes twice as many values. ::

    1 2 3 4 │ 5      ─►  12 34 5·      ─►  12 34 56 78 │ 9      ─►  1234 5678 9···
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Values:
    """The values of some neighbouring steps; those that are not finite are only counted."""

    first_step: int
    last_step: int
    total: float = 0.0
    weight: float = 0.0
    num_not_finite: int = 0

    def absorb(self, later: Values, /) -> None:
        """Take in the values that follow."""
        self.last_step = later.last_step
        self.total += later.total
        self.weight += later.weight
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
        values: the stretches, first to last, of equally many values each but for the last one.
        width: how many values each takes.
        last: the last value, which may be NaN or infinite; None before the first.
        last_step: the step that it belongs to.
        first_not_finite: the first step whose value was not finite, or None.
    """

    def __init__(self, max_stretches: int = 300) -> None:
        assert max_stretches >= 2
        self.values: list[Values] = []
        self.width = 1
        self.last: float | None = None
        self.last_step: int | None = None
        self.first_not_finite: int | None = None
        self._max = max_stretches
        self._num_in_last = 1

    def add(self, step: int, value: float, weight: float = 1.0) -> None:
        """Add a step's value; its weight counts in means."""
        self.last, self.last_step = value, step
        one = self._place(step)
        if math.isfinite(value):
            one.total += value * weight
            one.weight += weight
        else:
            one.num_not_finite += 1
            if self.first_not_finite is None:
                self.first_not_finite = step

    def _place(self, step: int) -> Values:
        """Give the stretch that a step belongs to."""
        if self._num_in_last == self.width and len(self.values) == self._max:
            self.halve()
        if self._num_in_last < self.width:
            self._num_in_last += 1
            self.values[-1].last_step = step
        else:
            self._num_in_last = 1
            self.values.append(Values(step, step))
        return self.values[-1]

    def halve(self) -> None:
        """Make one of each two neighbours."""
        self._num_in_last = self.width * (2 - len(self.values) % 2)
        for one, next_one in zip(self.values[::2], self.values[1::2], strict=False):
            one.absorb(next_one)
        del self.values[1::2]
        self.width *= 2

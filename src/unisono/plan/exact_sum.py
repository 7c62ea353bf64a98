"""Sums of floats without rounding: the same bits in any order and grouping.

Every finite float64 is a multiple of 2⁻¹⁰⁷⁴, so a sum is an integer number of those, which Python
adds exactly. It is rounded once, when it is read; ``math.fsum`` gives the same bits.
"""

from __future__ import annotations

from typing import final

_UNITS_OF_ONE = 1 << 1074


@final
class ExactSum:
    """An exact sum of float64."""

    def __init__(self, units: int = 0, not_finite: float = 0.0) -> None:
        self._units = units
        self._not_finite = not_finite

    def add(self, number: float) -> None:
        """Add a number."""
        try:
            numerator, denominator = number.as_integer_ratio()
        except (OverflowError, ValueError):
            self._not_finite += number
        else:
            # The denominator is a power of two.
            self._units += numerator * (_UNITS_OF_ONE // denominator)

    def add_all(self, other: ExactSum) -> None:
        """Add another sum."""
        self._units += other._units
        self._not_finite += other._not_finite

    def rounded(self) -> float:
        """Return the nearest float64; infinite on overflow, NaN for infinities of both signs."""
        if self._not_finite != 0.0:
            return self._not_finite
        try:
            return self._units / _UNITS_OF_ONE
        except OverflowError:
            return float("inf") if self._units > 0 else float("-inf")

    def as_json(self) -> list[int | float]:
        """Return the sum as JSON; ``ExactSum(*written)`` restores it."""
        return [self._units, self._not_finite]

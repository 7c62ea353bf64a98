"""When is a wait worth a word, and when is the next one? Pure.

A wait is long from max(3 s, 10 × the median) on: of steps where there are steps, else of the waits
that were seen before. While it lasts, a word is due whenever it has become twice as long.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

LEAST_S = 3.0
FACTOR = 10.0
GROWTH = 2.0
_REMEMBERED = 101


@dataclass(slots=True)
class Usual:
    """How long something takes, by the newest hundred times."""

    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def note(self, seconds: float) -> None:
        """Take one more time into account."""
        self.durations.append(seconds)

    @property
    def median_s(self) -> float | None:
        """The median, in seconds; None before the first."""
        return statistics.median(self.durations) if self.durations else None

    @property
    def long_s(self) -> float:
        """From when on it is long, in seconds."""
        return max(LEAST_S, FACTOR * (self.median_s or 0.0))


@dataclass(slots=True)
class Pauses:
    """When a word is due of a wait that lasts."""

    # how long the wait had lasted when the last word was said; 0 before the first
    said_at_s: float = 0.0

    def is_due(self, waited_s: float, long_s: float) -> bool:
        """Tell whether a word is due, and count it as said."""
        if waited_s < max(long_s, GROWTH * self.said_at_s):
            return False
        self.said_at_s = waited_s
        return True

    def begin(self) -> None:
        """Take into account that the wait is over."""
        self.said_at_s = 0.0

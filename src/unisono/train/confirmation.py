"""Which findings last? One that two windows in a row have is told; one window may err.

::

    window        0        1            2      3
    found         A        A B          B      ─
    told          ─        A            B      ─
    costs so far  ─        A in 0 and 1  and B in 1 and 2
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono.train.slowdown import COSTS, Slowdown, SlowdownCause

_Key = tuple[SlowdownCause, int | None]


class Confirmed:
    """The findings of one loop's windows. Final.

    Attributes:
        num_windows: how many there were.
    """

    def __init__(self) -> None:
        self.num_windows = 0
        self._before: dict[_Key, float] = {}
        self._now: list[_Key] = []
        self._costs_s: dict[_Key, float] = {}
        self._newest: dict[_Key, Slowdown] = {}

    def add(self, found: Iterable[Slowdown], num_steps: int) -> None:
        """Add a window.

        Args:
            found: what it has shown, each thing once.
            num_steps: how many steps it stands for: all since the window before.
        """
        self.num_windows += 1
        by_key = {one.key: one for one in found}
        costs_s = {key: one.lost_s * num_steps for key, one in by_key.items()}
        self._now = [key for key in by_key if key in self._before]
        for key in self._now:
            # The window before counts, too, unless it has been counted.
            before_s = 0.0 if key in self._newest else self._before[key]
            self._costs_s[key] = self._costs_s.get(key, 0.0) + before_s + costs_s[key]
            self._newest[key] = by_key[key]
        self._before = costs_s

    def now(self, lasted_s: float) -> tuple[Slowdown, ...]:
        """Give what the last two windows have both shown, the costliest first.

        Args:
            lasted_s: how long the loop has lasted, in seconds.
        """
        return self._costing(self._now, lasted_s)

    def over_all(self, lasted_s: float) -> tuple[Slowdown, ...]:
        """Give what has cost something of the whole loop, the costliest first."""
        found = self._costing(self._newest, lasted_s)
        return tuple(one for one in found if one.cost >= COSTS)

    def _costing(self, keys: Iterable[_Key], lasted_s: float) -> tuple[Slowdown, ...]:
        costs = {key: self._costs_s[key] / lasted_s if lasted_s > 0 else 0.0 for key in keys}
        found = [self._newest[key].costing(min(cost, 1.0)) for key, cost in costs.items()]
        return tuple(sorted(found, key=lambda one: -one.cost))

"""In which phases does a worker take longer than its core explains?

Cores of one machine differ, and not always alike: two virtual ones may share a real one with each
other or with strangers. A slower core makes all phases longer by a factor; whatever is wrong with a
worker's samples or passes makes a few phases longer by some time::

    ms            between  loading  forward  backward  sum   update
    the others    0.15     0.26     0.94     1.69      0.18  0.17
    worker 1      0.17     0.29     1.06     2.63      0.21  0.19
    as its core   0.17     0.29     1.06     1.91      0.20  0.19     1.13 times the others
    beyond that   ─        ─        ─        0.72      ─     ─

Workers are compared within each step, so that what disturbs them all cancels. Nothing here reads a
clock or a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from unisono.train.step_window import Seconds, median_of

_TELLING_S = 1e-5  # a shorter phase says nothing of a core
NEARLY_ALL = 0.75  # of the steps, at least
_ERRORS = 5.0  # standard errors: so far chance alone does not lead
_OF_MEDIAN = 1.4826 * 1.2533  # median deviation to standard deviation, its mean's to its median's
_NAMED = 0.25  # of the longest excess, a phase has at least if it is named


@dataclass(frozen=True, slots=True)
class PhaseExcess:
    """What one worker takes beside the others."""

    core: float  # the factor by which its core is slower than the others'; 1: as fast
    expected: Seconds  # seconds that its share takes on its core, of shape (phases,)
    by_step: Seconds  # seconds that it takes longer than that, of shape (steps, phases)

    @property
    def longest(self) -> list[int]:
        """The phases with the longest excess, the longest first."""
        usual = median_of(self.by_step)
        return [int(p) for p in np.argsort(-usual) if usual[p] >= _NAMED * usual.max()]

    @property
    def excess_s(self) -> float:
        """By how many seconds of a step those phases are longer than expected."""
        return float(median_of(self.by_step)[self.longest].sum())

    @property
    def is_sure(self) -> bool:
        """Whether they are so in nearly all steps, and by more than chance makes of a few."""
        in_all = self.by_step[:, self.longest].sum(axis=1)
        deviation = float(median_of(np.abs(in_all - median_of(in_all))))
        error_s = _OF_MEDIAN * deviation / math.sqrt(len(in_all))
        is_usual = float((in_all > 0).mean()) >= NEARLY_ALL
        return is_usual and self.excess_s >= _ERRORS * error_s

    @property
    def own_s(self) -> float:
        """How many seconds of a step they take."""
        return float(self.expected[self.longest].sum()) + self.excess_s


def excess_of(times: Seconds, shares: Seconds, at: int) -> PhaseExcess:
    """Compare one worker with the others.

    Args:
        times: seconds, of shape (steps, workers, phases); two workers or more.
        shares: how much each worker should take of each phase, in any unit; of shape (workers,
            phases).
        at: the index of the worker.
    """
    of_unit = times / shares
    others: Seconds = median_of(np.delete(of_unit, at, axis=1).swapaxes(0, 1)) * shares[at]
    usual, own = median_of(others), median_of(times[:, at])
    is_telling = usual >= _TELLING_S
    core = _middle(own[is_telling] / usual[is_telling])
    return PhaseExcess(core, core * usual, times[:, at] - core * others)


def _middle(ratios: Seconds) -> float:
    """Give the median; of what may be one, whatever is next to 1: a core is not to explain much."""
    num = len(ratios)
    if num < 2:
        return 1.0
    ascending = np.sort(ratios)
    return float(np.clip(1.0, ascending[(num - 1) // 2], ascending[num // 2]))

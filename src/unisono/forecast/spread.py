"""What does the slowest of N workers take, where each draws its time from what was measured?

Nothing beyond the longest measured time is ever expected: a rarer delay is not known.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


def expected_maximum(values: Values, number: int) -> float:
    """Give the mean of the largest of `number` independent draws.

    Args:
        values: what is drawn from, each equally likely; shape (n,), n ≥ 1.
        number: of draws, at least 1.
    """
    # The largest is at most the i-th in order with probability (i / n) ** number.
    ascending = np.sort(values)
    at_most = (np.arange(len(ascending) + 1) / len(ascending)) ** number
    return float(np.dot(ascending, np.diff(at_most)))


def largest_of(ascending: Values, number: int, levels: Values) -> Values:
    """Give the largest of `number` draws at each level of its probability.

    Args:
        ascending: what is drawn from, in order; shape (n,).
        number: of draws.
        levels: in (0, 1], of shape (draws,).
    """
    places = np.ceil(levels ** (1 / number) * len(ascending)).astype(int) - 1
    found: Values = ascending[np.clip(places, 0, len(ascending) - 1)]
    return found


def levels(number: int, generator: np.random.Generator) -> Values:
    """Give levels that fill (0, 1) evenly, in random order; shape (number,)."""
    filled: Values = (generator.permutation(number) + 0.5) / number
    return filled


def calibration(values: Values) -> float:
    """Say by how much deviations from the mean of N workers' times have to be stretched.

    Deviations from the mean of few are smaller than those from the true mean, and workers may be
    slow together. So the stretch is chosen such that the slowest of as many draws as there were
    workers takes as long, in the mean, as the slowest did.

    Args:
        values: of shape (steps, workers).
    """
    excess = float((values.max(axis=1) - values.mean(axis=1)).mean())
    deviations = (values - values.mean(axis=1, keepdims=True)).ravel()
    drawn = expected_maximum(deviations, values.shape[1])
    return excess / drawn if drawn > 0 and math.isfinite(excess / drawn) else 0.0

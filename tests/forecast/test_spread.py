"""The slowest of N workers, from what was measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.forecast.spread import calibration, expected_maximum, largest_of, levels

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30).map(np.array)


@given(VALUES.filter(lambda values: len(values) <= 5), st.integers(1, 4))
def test_the_expected_maximum_is_the_mean_over_all_draws(values: np.ndarray, number: int) -> None:
    every = [max(drawn) for drawn in itertools.product(values, repeat=number)]
    assert expected_maximum(values, number) == pytest.approx(np.mean(every), abs=1e-6)


@given(VALUES, st.integers(1, 1000))
def test_more_workers_wait_longer_but_never_beyond_what_was_seen(
    values: np.ndarray, number: int
) -> None:
    one, more = expected_maximum(values, number), expected_maximum(values, number + 1)
    assert one <= more + 1e-6
    assert values.mean() - 1e-6 <= one <= values.max() + 1e-6


@given(VALUES, st.integers(1, 100))
def test_drawn_maxima_have_the_expected_mean(values: np.ndarray, number: int) -> None:
    drawn = largest_of(np.sort(values), number, levels(4000, np.random.default_rng(0)))
    width = np.ptp(values) + 1e-9
    assert drawn.mean() == pytest.approx(expected_maximum(values, number), abs=0.01 * width)


@given(st.integers(2, 5), st.integers(0, 10**6))
def test_calibrated_deviations_give_the_measured_excess(num_workers: int, seed: int) -> None:
    times = np.random.default_rng(seed).exponential(size=(40, num_workers))
    apart = times - times.mean(axis=1, keepdims=True)
    excess = expected_maximum(apart.ravel() * calibration(times), num_workers)
    assert excess == pytest.approx((times.max(axis=1) - times.mean(axis=1)).mean())


def test_workers_that_are_always_alike_have_no_excess() -> None:
    assert calibration(np.ones((5, 2))) == 0.0

"""However long the row, what is kept is small, and its means are true."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.tools.report.history import Series


def filled(values, max_stretches=4):
    series = Series(max_stretches)
    for step, value in enumerate(values):
        series.add(step, value)
    return series


@pytest.mark.parametrize(
    ("num_values", "width", "steps"),
    [
        (0, 1, []),
        (1, 1, [(0, 0)]),
        (4, 1, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (5, 2, [(0, 1), (2, 3), (4, 4)]),
        (8, 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (9, 4, [(0, 3), (4, 7), (8, 8)]),
    ],
)
def test_neighbours_become_one_when_it_is_full(num_values, width, steps):
    series = filled(range(num_values))
    assert series.width == width
    assert [(v.first_step, v.last_step) for v in series.values] == steps


@pytest.mark.slow
@given(st.lists(st.integers(-1000, 1000), max_size=200), st.integers(2, 9))
def test_stretches_cover_all_values_once(values, max_stretches):
    kept = filled(values, max_stretches).values
    assert len(kept) <= max_stretches
    assert [step for v in kept for step in range(v.first_step, v.last_step + 1)] == list(
        range(len(values))
    )
    for v in kept:
        part = values[v.first_step : v.last_step + 1]
        assert v.mean == sum(part) / len(part)


def test_a_mean_is_over_samples():
    series = Series(2)
    for step, (value, weight) in enumerate([(1.0, 3), (5.0, 1), (9.0, 1)]):
        series.add(step, value, weight)
    assert [v.mean for v in series.values] == [2.0, 9.0]


def test_what_is_not_finite_is_counted_and_leaves_means_alone():
    series = filled([1.0, math.nan, math.inf, math.nan, 5.0])
    assert [v.mean for v in series.values] == [1.0, None, 5.0]
    assert [v.num_not_finite for v in series.values] == [1, 2, 0]
    assert series.first_not_finite == 1
    assert (series.last, series.last_step) == (5.0, 4)

"""The order of passes of a model that is cut into stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.pipeline import (
    StagePass,
    expected_bubble,
    length_of_passes,
    limit_of,
    num_due,
    passes_of,
)

LIMITS = st.none() | st.integers(1, 6)
EQUAL = {False: 1.0, True: 1.0}
BACKWARD_TAKES_TWICE = {False: 1.0, True: 2.0}


def words(passes):
    return " ".join("FB"[one.is_backward] + str(one.index) for one in passes)


def schedule(num_shards, num_stages, in_flight=None):
    return [passes_of(stage, num_shards, num_stages, in_flight) for stage in range(num_stages)]


@pytest.mark.parametrize(
    ("num_stages", "in_flight", "expected"),
    [
        (1, None, ["F0 B0 F1 B1 F2 B2"]),
        (2, None, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        (2, 1, ["F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2"]),
        (3, None, ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        (3, 2, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2"]),
        (2, 9, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
    ],
)
def test_orders_of_three_shards(num_stages, in_flight, expected):
    assert list(map(words, schedule(3, num_stages, in_flight))) == expected


@given(st.integers(1, 12), st.integers(1, 5), LIMITS)
def test_every_stage_computes_every_shard_once_in_order(num_shards, num_stages, in_flight):
    for passes in schedule(num_shards, num_stages, in_flight):
        for is_backward in (False, True):
            of_kind = [one.index for one in passes if one.is_backward is is_backward]
            assert of_kind == list(range(num_shards))
        for index in range(num_shards):
            assert passes.index(StagePass(index, False)) < passes.index(StagePass(index, True))


@given(st.integers(1, 12), st.integers(1, 5), LIMITS)
def test_nobody_waits_for_ever_and_no_more_are_in_flight_than_may_be(
    num_shards, num_stages, in_flight
):
    _, most = length_of_passes(schedule(num_shards, num_stages, in_flight), EQUAL)
    for stage, number in enumerate(most):
        assert number <= limit_of(stage, num_stages, in_flight)
    assert most[0] == min(num_shards, num_stages, in_flight or num_stages)


@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)]))
def test_a_step_is_as_short_as_stages_allow(num_shards, num_stages, times):
    seconds = dict(zip((False, True), times, strict=True))
    length, _ = length_of_passes(schedule(num_shards, num_stages), seconds)
    busy = num_shards * sum(times)
    assert length == busy + (num_stages - 1) * sum(times)
    formula = (num_stages - 1) / (num_shards + num_stages - 1)
    assert 1 - busy / length == pytest.approx(formula)
    assert expected_bubble(num_shards, num_stages) == pytest.approx(formula)


@given(st.integers(1, 12), st.integers(1, 5))
def test_with_one_shard_in_flight_stages_take_turns(num_shards, num_stages):
    length, _ = length_of_passes(schedule(num_shards, num_stages, 1), BACKWARD_TAKES_TWICE)
    assert length == num_shards * num_stages * 3
    assert expected_bubble(num_shards, num_stages, 1) == pytest.approx(1 - 1 / num_stages)


def test_two_stages_and_eight_shards_are_1_78_times_as_fast_as_in_turns():
    pipelined, _ = length_of_passes(schedule(8, 2), BACKWARD_TAKES_TWICE)
    in_turns, _ = length_of_passes(schedule(8, 2, 1), BACKWARD_TAKES_TWICE)
    assert in_turns / pipelined == pytest.approx(16 / 9)
    assert expected_bubble(8, 2) == pytest.approx(1 / 9)


def test_an_order_in_which_all_wait_is_noticed():
    forward, backward = StagePass(0, False), StagePass(0, True)
    with pytest.raises(ValueError, match="waits for another"):
        length_of_passes([[backward, forward], [forward, backward]], EQUAL)


def test_at_least_one_shard_must_be_in_flight():
    with pytest.raises(ValueError, match="`shards_in_flight` must be at least 1, but is 0"):
        limit_of(0, 2, 0)


def test_the_last_forward_pass_is_followed_by_all_that_is_left():
    assert num_due(2, 2, is_last=True) == 2
    assert num_due(1, 2, is_last=False) == 0

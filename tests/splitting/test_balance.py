"""Where a model is cut: tables, and brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.engine.splitting.balance import assigned, divide


@pytest.mark.parametrize(
    ("costs", "num_devices", "expected"),
    [
        ([5], 1, [0]),
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([3, 1, 4, 1, 5, 9], 3, [0, 0, 0, 0, 1, 2]),
        ([9, 1, 1, 1], 2, [0, 1, 1, 1]),
        ([1, 1, 1, 9], 2, [0, 0, 0, 1]),
        ([0, 0, 7], 3, [0, 1, 2]),
        ([7, 0, 0], 3, [0, 1, 2]),
        ([0, 0, 0], 2, [0, 0, 1]),
    ],
)
def test_units_are_divided(costs, num_devices, expected):
    assert divide(costs, num_devices) == expected


costs_and_devices = st.lists(st.integers(0, 9), min_size=1, max_size=9).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def largest(costs, place_of):
    return max(
        sum(cost for cost, place in zip(costs, place_of, strict=True) if place == each)
        for each in set(place_of)
    )


@pytest.mark.slow
@given(costs_and_devices)
def test_devices_have_consecutive_units_and_none_is_empty(drawn):
    costs, num_devices = drawn
    place_of = divide(costs, num_devices)
    assert place_of == sorted(place_of)
    assert set(place_of) == set(range(num_devices))
    assert len(place_of) == len(costs)


@pytest.mark.slow
@given(costs_and_devices)
def test_no_division_has_a_cheaper_costliest_device(drawn):
    costs, num_devices = drawn
    best = min(
        largest(costs, [sum(at >= start for start in starts) for at in range(len(costs))])
        for starts in itertools.combinations(range(1, len(costs)), num_devices - 1)
    )
    assert largest(costs, divide(costs, num_devices)) == best


def test_a_model_has_a_unit_for_each_device():
    with pytest.raises(ValueError, match="2 parts that can be computed separately for 3 devices"):
        divide([1, 1], 3)


NAMES = ["embed", "pos", "blocks.0.a", "blocks.0.b", "blocks.1.a", "mask", "head"]
NEEDED = [name != "mask" for name in NAMES]
PLACES = {0: 0, 1: 1, "sim:0": 0, "sim:1": 1}


def assign(balance):
    return assigned(balance, PLACES, NAMES, NEEDED)


def test_names_say_where_units_are():
    first, second = ["embed", "pos", "blocks.0"], ["blocks.1", "head"]
    assert assign({"sim:0": first, "sim:1": second}) == [0, 0, 0, 0, 1, 1, 1]
    assert assign({0: first, 1: second}) == [0, 0, 0, 0, 1, 1, 1]
    assert assign({"sim:0": [""], "sim:1": ["blocks", "head"]}) == [0, 0, 1, 1, 1, 0, 1]
    assert assign({0: ["blocks", ""], 1: ["blocks.0.b"]}) == [0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("balance", "error", "words"),
    [
        (
            {0: ["embed", "pos"], 1: ["head"]},
            ValueError,
            "`blocks.0.a`, `blocks.0.b`, `blocks.1.a`:",
        ),
        ({"sim:2": ["embed"]}, ValueError, "`sim:0`, `sim:1`, but one is 'sim:2'"),
        ({0: "embed"}, TypeError, r"write `\['embed'\]`"),
        ({0: {"embed"}}, TypeError, r"it has \{'embed'\}: write `list\(…\)`"),
        ({0: [0]}, TypeError, "names of layers, as in `named_modules.*`, but for 0 it has 0:"),
        ({0: ["blocks.0.a.weight"]}, ValueError, "apart, but has 'blocks.0.a.weight': there are"),
        ({0: ["", "head"], 1: ["head"]}, ValueError, "names `head` for two devices"),
        ({0: ["bl"]}, ValueError, "has 'bl'"),
    ],
)
def test_wrong_names_are_refused(balance, error, words):
    with pytest.raises(error, match=words):
        assign(balance)

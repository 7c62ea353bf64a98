import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.exact_sum import ExactSum

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


def summed(numbers):
    total = ExactSum()
    for number in numbers:
        total.add(number)
    return total


@pytest.mark.slow
@given(st.lists(st.one_of(finite, st.floats(-1e3, 1e3, width=32))))
def test_a_sum_is_rounded_once(numbers):
    try:
        expected = math.fsum(numbers)
    except OverflowError:  # on the way; ours has no way
        return
    assert summed(numbers).rounded().hex() == expected.hex()


@pytest.mark.slow
@given(st.lists(st.lists(finite)), st.randoms())
def test_order_and_groups_change_no_bit(groups, random):
    whole = summed(number for group in groups for number in group)
    random.shuffle(groups)
    total = ExactSum()
    for group in groups:
        random.shuffle(group)
        told = json.loads(json.dumps(summed(group).as_json()))
        total.add_all(ExactSum(*told))
    assert total.rounded().hex() == whole.rounded().hex()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], 0.0),
        ([-0.0], 0.0),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([1e308, 1e308, -1e308], 1e308),
        ([1e16, 1.0, -1e16], 1.0),
        ([5e-324, 5e-324], 1e-323),
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1e308, 1e308], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0, math.inf], math.nan),
    ],
)
def test_what_plain_addition_loses_or_makes_of_infinities(numbers, expected):
    found = summed(numbers)
    again = ExactSum(*json.loads(json.dumps(found.as_json())))
    assert found.rounded().hex() == again.rounded().hex() == expected.hex()

"""Workers killed at random: a short piece of what ``make chaos`` does at length."""

from __future__ import annotations

import pytest
from tests.chaos import driver


def test_a_seed_fixes_instants_and_victims():
    assert driver.plan(5, 40, 300) == driver.plan(5, 40, 300)
    assert driver.plan(5, 40, 300) != driver.plan(6, 40, 300)
    assert {kill.aim for kill in driver.plan(5, 400, 300)} == {None, *driver.AIMS}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.long)])
def test_random_kills_change_nothing(seed):
    outcome = driver.chaos(seed, num_kills=8, num_steps=90, num_workers=3, timeout_s=90)
    assert outcome.is_equal, outcome.trouble
    assert outcome.num_kills == 8

"""When is a forecast good enough?"""

from __future__ import annotations

import pytest
from bench.forecast import Row


@pytest.mark.parametrize(
    ("forecast_s", "measured_s", "is_met"),
    [
        ([1.04, 2.0, 0.9], [1.0, 1.0, 1.0], True),
        ([0.94], [1.0], False),
        ([1.2], [1.0, 1.3, 0.9], True),  # another run took longer
        ([1.2], [1.0, 1.1, 0.9], False),
    ],
)
def test_a_forecast_is_within_its_limit_or_what_was_measured(
    forecast_s: list[float], measured_s: list[float], is_met: bool
) -> None:
    assert Row("cnn, 1 worker", 0.05, forecast_s, measured_s).is_met == is_met

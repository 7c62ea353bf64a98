"""How long stages waited, from what they have measured."""

import pytest

from unisono.train.bubble import measured_bubble


@pytest.mark.parametrize(
    ("seconds", "num_stages", "expected"),
    [
        ({0: (9.0, 9.0), 1: (9.0, 9.0)}, 2, 0.0),
        ({0: (8.0, 9.0), 1: (8.0, 8.5)}, 2, 1 / 9),  # the second one was done earlier
        ({0: (5.0, 10.0), 1: (5.0, 10.0), 2: (10.0, 10.0), 3: (10.0, 10.0)}, 2, 0.25),
        ({0: (0.0, 0.0), 1: (0.0, 0.0)}, 2, 0.0),
    ],
)
def test_the_bubble_is_the_time_without_passes(seconds, num_stages, expected):
    assert measured_bubble(seconds, num_stages) == pytest.approx(expected)

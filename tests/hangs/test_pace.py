"""When a wait is long, and when the next word is due: by tables."""

from __future__ import annotations

import pytest

from unisono.runtime.hangs.explanation import Usual, is_due


@pytest.mark.parametrize(
    ("durations", "long_s"),
    [
        ([], 3.0),
        ([0.003] * 9, 3.0),
        ([0.3], 3.0),
        ([0.31], 3.1),
        ([0.01, 2.0, 2.0], 20.0),
        ([0.01, 0.01, 100.0], 3.0),  # one slow step is not the median
        ([5.0] * 100 + [0.01] * 101, 3.0),  # the newest count
    ],
)
def test_a_wait_is_long_from_ten_times_the_median_on_but_not_before_three_seconds(
    durations: list[float], long_s: float
) -> None:
    usual = Usual()
    for seconds in durations:
        usual.note(seconds)
    assert usual.long_s == pytest.approx(long_s)


@pytest.mark.parametrize(("long_s", "said"), [(3.0, [3, 6, 12, 24, 48, 96]), (20.0, [20, 40, 80])])
def test_pauses_between_words_grow_from_what_is_long(long_s: float, said: list[int]) -> None:
    told = [0]
    for waited_s in range(100):
        if is_due(waited_s, long_s, told[-1]):
            told.append(waited_s)
    assert told[1:] == said

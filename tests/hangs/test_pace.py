"""When a wait is long, and when the next word is due: by tables."""

from __future__ import annotations

import pytest

from unisono.runtime.hangs.explanation import Pauses, Usual


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


def test_pauses_between_words_grow() -> None:
    pauses = Pauses()
    said = [waited_s for waited_s in range(100) if pauses.is_due(waited_s, 3.0)]
    assert said == [3, 6, 12, 24, 48, 96]
    pauses.begin()
    assert not pauses.is_due(2.9, 3.0)
    assert pauses.is_due(3.0, 3.0)


def test_the_first_word_waits_for_what_is_long() -> None:
    pauses = Pauses()
    assert [t for t in range(50) if pauses.is_due(t, 20.0)] == [20, 40]

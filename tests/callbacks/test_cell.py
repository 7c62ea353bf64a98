"""How a run looks in a notebook."""

from __future__ import annotations

import pytest

from unisono.runtime.launch.cell import (
    Count,
    DisplayState,
    Observed,
    in_notebook,
    launcher_draws,
)
from unisono.runtime.launch.job import launch_environment

BAR = "━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("sight", "line"),
    [
        (DisplayState(0, 10), "─" * 30 + "  0/10 steps"),
        (DisplayState(0, 0), BAR + "  0/0 steps"),
        (
            DisplayState(500, 1000, 2.0, 500, 8000, 4, 0.25),
            "epoch 5  " + BAR[:15] + "─" * 15 + "  500/1,000 steps  loss 0.2500  "
            "4,000 samples/s  2 s left",
        ),
        (
            DisplayState(1, 100_000, 0.1, 1, 16, 0, float("nan")),
            "epoch 1  " + "─" * 30 + "  1/100,000 steps  loss nan  160 samples/s  2 h 46 min left",
        ),
        (
            DisplayState(10, 10, 65.0, 4, 65, 0, 1.0),
            f"epoch 1  {BAR}  10/10 steps  loss 1.0000  1 samples/s",
        ),
    ],
)
def test_a_sight_in_one_line(sight, line):
    assert str(sight) == line


def test_a_run_is_shown_a_few_times_a_second_and_at_its_end():
    shown, clock = [], Clock()
    count = Count(Observed.every_s, clock)
    observed = Observed(shown.append)
    observed.start(count.start(2, 12))
    for _ in range(10):
        clock.now += 0.1
        state = count.step(0, 0.5, 32)
        if state is not None:
            observed.show(state)
    observed.stop(count.state)
    observed.stop(count.state)
    assert [state.done for state in shown] == [2, 5, 8, 11, 12]
    assert shown[-1].samples == 320


def test_who_stops_before_the_end_claims_nothing():
    shown = []
    observed = Observed(shown.append)
    observed.start(DisplayState(0, 10))
    observed.stop(DisplayState(1, 10, 0.1, 1, 32, 0, 0.5))
    assert [state.done for state in shown] == [0]


def test_nobody_draws_in_cells_without_a_notebook(monkeypatch):
    assert not in_notebook()
    assert not launcher_draws()
    there = launch_environment({}, [], launcher_draws=True)
    monkeypatch.setenv("UNISONO_PROGRESS", there["UNISONO_PROGRESS"])
    assert launcher_draws()
    assert "UNISONO_PROGRESS" not in launch_environment(there, [])

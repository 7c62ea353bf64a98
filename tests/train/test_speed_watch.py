"""Watching takes the leader's word alone, rests, and never ends a run."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import unisono
from unisono.step.phase_timers import DELAYED
from unisono.train import speed_watch
from unisono.train.slowdown import TOLD, Slowdown, SlowdownCause
from unisono.train.speed_watch import WARMUP_STEPS, WINDOW_STEPS
from unisono.train.step_window import COLUMNS, times_of

nan = float("nan")


def told(begun_s, *phases_s, delayed_s=nan):
    return (begun_s, *phases_s, delayed_s)


ROWS = [
    ([told(10.0, 1, 2, 3, 0, 0, 0), told(10.5, 1, 1, 1, 1, 1, 1)], True),
    ([told(16.25, 1, 2, 3, 4, 5, 6, delayed_s=0.5), told(17.0, 0, 0, 0, 9, 0, 0)], True),
    ([told(38.0, 1, 0, 0, 0, 0, 0), told(26.0, 1, 0, 0, 0, 0, 0)], False),
    ([told(40.0, 1, 0, 0, 0, 0, 0), told(29.0, 1, 0, 0, 0, 0, 0)], True),
]


def test_what_is_between_steps_is_from_the_end_of_one_to_the_begin_of_the_next():
    times = times_of(ROWS)
    assert times.shape == (2, 2, len(COLUMNS))  # neither the first nor the short one
    between, *phases, delayed = times[0, 0]
    assert (between, phases, delayed) == (0.25, [1, 2, 3, 4, 5, 6], 0.5)
    assert times[:, :, 0].tolist() == [[0.25, 0.5], [1.0, 2.0]]
    assert np.isnan(times[0, 1, -1])


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_window_may_be_next_to_empty(num_rows):
    assert times_of(ROWS[:num_rows]).shape == (num_rows - 1, 2, len(COLUMNS))
    assert len(ROWS[0][0][0]) == DELAYED + 1


class Seen(unisono.callbacks.Callback):
    """Notes what is found after each step."""

    def __init__(self):
        self.steps, self.newest = [], None

    def on_step_end(self, fit, step):
        if fit.speed is not self.newest:
            self.newest = fit.speed
            self.steps.append(step.number)


def fit(steps, **options):
    torch.manual_seed(0)
    model, seen = torch.nn.Linear(4, 1), Seen()
    data = torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(
        model,
        optimizer,
        lambda model, batch: F.mse_loss(model(batch), batch[:, :1]),
        shards=1,
        callbacks=[seen],
        **options,
    )
    summary = trainer.fit(data, batch_size=8, steps=steps)
    return seen, summary


def test_two_windows_are_watched_then_there_is_a_rest():
    seen, summary = fit(500)
    first = WARMUP_STEPS + WINDOW_STEPS + 1
    assert seen.steps == [first, first + WINDOW_STEPS + 1]
    assert summary.slowness == ""  # one worker has nobody to wait for


@pytest.mark.parametrize("cause", list(SlowdownCause))
def test_what_nobody_need_be_told_stands_in_the_file_alone(cause, monkeypatch, capfd):
    found = (Slowdown(cause, 1.0, 1.0, 0.5, 0.5, "it is so", "do that", 1, ("forward",)),)
    monkeypatch.setattr(speed_watch, "judge", lambda window: found)
    seen, summary = fit(300)
    (one,) = seen.newest["findings"]
    assert (one["cause"], one["rank"], one["phases"]) == (cause.value, 1, ["forward"])
    assert one["cost"] == 1.0  # a second a step of a run that lasts less
    line = "it is so, which costs 100 % of the run: do that"
    assert summary.slowness == (line if cause in TOLD else "")
    assert (line in capfd.readouterr().out.splitlines()) == (cause in TOLD)


def test_a_short_run_is_not_judged():
    seen, summary = fit(60)
    assert (seen.steps, summary.slowness) == ([], "")


def test_whatever_fails_there_ends_no_run(monkeypatch, capfd):
    digest = fit(300)[1].digest

    def fails(window):
        raise ZeroDivisionError("a test")

    monkeypatch.setattr(speed_watch, "judge", fails)
    seen, summary = fit(300)
    assert (seen.steps, summary.digest) == ([], digest)
    assert capfd.readouterr().err.count("ZeroDivisionError: a test") == 1


def test_watching_goes_on_after_steps_that_came_again(tmp_path, monkeypatch):
    """A call that goes on from a checkpoint counts from there."""
    fit(100, directory=tmp_path)
    seen, _ = fit(300, directory=tmp_path)
    assert seen.steps[0] == 100 + WARMUP_STEPS + WINDOW_STEPS + 1

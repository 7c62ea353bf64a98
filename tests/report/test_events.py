"""One line of an event file: what it says, what is missing, what cannot be read."""

import json
import math

import pytest

from unisono.training.events.events import (
    CheckpointRequest,
    End,
    Evaluation,
    Failure,
    NewerFormatError,
    Start,
    StepEvent,
    WentBack,
    Workers,
    read_event,
)

STEP = {
    "event": "step",
    "time_unix_s": 1.5,
    "step": 12,
    "epoch": 0,
    "num_samples": 64,
    "seconds": 0.007,
    "means": {"loss": 0.69, "accuracy": "nan"},
    "learning_rates": [0.001],
    "gradient_norm": "inf",
    "ranks": [0, 2],
    "loading_s": [0.25, None],
    "waiting_s": [-1, "nan"],
}


def read(**line):
    return read_event(json.dumps(line).encode())


def test_a_step_has_its_columns():
    step = read(**STEP)
    assert isinstance(step, StepEvent)
    assert (step.step, step.num_samples, step.learning_rates) == (12, 64, (0.001,))
    assert step.means["loss"] == 0.69
    assert math.isnan(step.means["accuracy"])
    assert step.gradient_norm == math.inf
    assert step.loading_s == (0.25, None)
    assert step.forward_s == ()
    assert step.waiting_s == (None, None)  # no time is negative, or not a number


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ({"event": "went_back", "time_unix_s": 1, "step": 3}, WentBack(1.0, 3, None)),
        ({"event": "checkpoint", "time_unix_s": 1, "step": 3}, CheckpointRequest(1.0, 3)),
        (
            {"event": "evaluation", "time_unix_s": 1, "step": 3, "means": {"loss": 2}},
            Evaluation(1.0, 3, None, {"loss": 2.0}),
        ),
        (
            {"event": "failure", "time_unix_s": 1, "step": 3, "error": "E", "message": "m"},
            Failure(1.0, 3, None, "E", "m"),
        ),
        (
            {"event": "end", "time_unix_s": 1, "step": 3, "digest": "ab"},
            End(1.0, 3, None, None, "ab", False),
        ),
        (
            {"event": "workers", "time_unix_s": 1, "step": 3, "ranks": [0], "lost": [1]},
            Workers(1.0, 3, (0,), (), (1,), (), ()),
        ),
    ],
)
def test_each_event_is_read(line, event):
    assert read(**line) == event


def test_a_metric_of_several_numbers_hides_no_other():
    means = {"loss": 2.5, "f1": [0.5, "nan"], "confusion": [[1, 2], [3, 4]]}
    found = read(event="evaluation", time_unix_s=1, step=3, means=means)
    assert found == Evaluation(1.0, 3, None, {"loss": 2.5})


def test_a_start_with_nothing_but_its_step_is_read():
    start = read(event="start", step=0, surprise=[1])
    assert isinstance(start, Start)
    assert (start.shards, start.command, start.identity) == (None, (), {})
    assert math.isnan(start.time_unix_s)


@pytest.mark.parametrize("event", ["start", "workers"])
def test_a_process_may_not_be_known(event):
    assert read(event=event, step=0, ranks=[0, 1], pids=[None, 12]).pids == (None, 12)
    assert read(event=event, step=0, ranks=[0], pids=[None]).pids == (None,)
    for wrong in ([None, "12"], [True], [-1], [1.5]):
        with pytest.raises(ValueError, match="`pids` must hold whole numbers"):
            read(event=event, step=0, ranks=[0, 1], pids=wrong)


@pytest.mark.parametrize("line", [{"event": "tomorrow"}, {"event": "tomorrow", "step": "x"}, {}])
def test_an_unknown_event_is_passed_over(line):
    assert read(**line) is None


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": -1},
        {"step": 1.0},
        {"step": True},
        {"step": 10**20},
        {"seconds": "fast"},
        {"seconds": 10**400},
        {"means": [1]},
        {"means": {"loss": None}},
        {"ranks": [0, "1"]},
        {"ranks": [0]},  # not as long as its columns
        {"ranks": list(range(5000))},
        {"loading_s": [0.1]},
        {"learning_rates": 0.1},
        {"time_unix_s": {}},
        {"event": ["step"]},
    ],
)
def test_a_wrong_type_makes_the_line_unreadable(change):
    with pytest.raises(ValueError):
        read(**{**STEP, **change})


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 200_000, b'{"event":"step","step":1' + b"0" * 9999],
)
def test_what_is_no_object_is_unreadable(line):
    with pytest.raises(ValueError):
        read_event(line)


def test_a_newer_format_is_told_apart():
    with pytest.raises(NewerFormatError, match="format 2"):
        read(event="start", step=0, format=2)

"""Curves over the steps: metrics, learning rate, speed, norm of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.quantities import plural
from unisono.report.figure import Figure, Key, curve_trace, series_colour
from unisono.report.history import History, ValidationCurve
from unisono.report.series import Series
from unisono.report.text import name

_FEW_DOTS = 60  # validations that get a dot each
_FEW_STEPS = 8  # so few that a tick for each has room


def learning(history: History) -> list[Figure]:
    """Return the curves of what is learnt: each metric, the loss first."""
    names = sorted({*history.means, *history.validation}, key=lambda one: (one != "loss", one))
    return [_metric(history, one, is_wide=one == "loss" or len(names) == 1) for one in names]


def others(history: History) -> list[Figure]:
    """Return the curves of how it was learnt: learning rate, speed, norm of the gradients."""
    figures = [
        _single("Samples per second", history.samples_per_second, from_zero=True),
        _single("Learning rate", history.learning_rate, from_zero=True),
        _single("Norm of the gradients", history.gradient_norm),
    ]
    return [figure for figure in figures if figure.data[0]["x"]]


def _metric(history: History, metric: str, *, is_wide: bool) -> Figure:
    data: list[dict[str, Any]] = []
    keys: list[Key] = []
    note = ""
    if metric in history.means:
        series = history.means[metric]
        data, note = [series_trace(series, "training", series_colour(0))], _note(series)
        keys.append(Key("training", series_colour(0), "training"))
    if metric in history.validation:
        colour = series_colour(1)
        data.append(validation_trace(history.validation[metric], "validation", colour))
        keys.append(Key("validation", colour, "validation"))
    height_px = 340 if is_wide else 260
    return Figure(name(metric), note, data, over_steps(data), height_px, tuple(keys), is_wide)


def _single(title: str, series: Series, *, from_zero: bool = False) -> Figure:
    data = [series_trace(series, title.lower(), series_colour(2))]
    return Figure(title, _note(series), data, over_steps(data, from_zero=from_zero), 260)


def series_trace(series: Series, label: str, colour: str, **change: Any) -> dict[str, Any]:
    """Return the trace of a series; ``change`` is as for :func:`curve_trace`."""
    steps, means = [v.middle_step for v in series.values], [v.mean for v in series.values]
    return curve_trace(steps, means, label, colour, **change)


def _note(series: Series) -> str:
    """Say what a point of a curve stands for, and what is missing."""
    notes = [f"A point is the mean of {series.width} steps."] if series.width > 1 else []
    if number := sum(one.num_not_finite for one in series.values):
        notes.append(f"Not finite, so not drawn: {plural(number, 'step')}.")
    return " ".join(notes)


def validation_trace(
    validation: ValidationCurve, label: str, colour: str, **change: Any
) -> dict[str, Any]:
    """Return the trace of what evaluations said; ``change`` is as for :func:`curve_trace`."""
    marker = {"size": 7, "symbol": "diamond"}
    steps, values = validation.steps, validation.values
    return curve_trace(steps, values, label, colour, num_dots=_FEW_DOTS, marker=marker, **change)


def over_steps(data: Sequence[dict[str, Any]], *, from_zero: bool = False) -> dict[str, Any]:
    """Return a layout whose horizontal axis counts steps."""
    ends = [trace["x"][i] for trace in data for i in (0, -1) if trace["x"]]
    low, high = min(ends, default=0), max(ends, default=1)
    margin = (high - low) * 0.01 or 0.5
    return {
        "xaxis": step_axis(low - margin, high + margin),
        "yaxis": {"rangemode": "tozero" if from_zero else "normal"},
    }


def step_axis(low: float, high: float) -> dict[str, Any]:
    """Return an axis that counts steps; there is none between two."""
    axis: dict[str, Any] = {"title": {"text": "step"}, "range": [low, high]}
    return axis | {"dtick": 1} if high - low < _FEW_STEPS else axis

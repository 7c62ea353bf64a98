"""Curves over the steps: metrics, learning rate, speed, norm of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.quantities import plural
from unisono.report.figure import Figure, Key, band_traces, curve_trace, drawn_marks, series_colour
from unisono.report.history import History, ValidationCurve
from unisono.report.marks import Mark
from unisono.report.series import Series, smoothed
from unisono.report.text import name

_FEW = 60  # values that are drawn as they are
_FEW_STEPS = 8  # so few that a tick for each has room
_SMOOTH_PART = 40  # a smoothed point is the mean of this part of all, on either side


def learning(history: History) -> list[Figure]:
    """Return the curves of what is learnt: each metric, the loss first."""
    names = sorted({*history.means, *history.validation}, key=lambda one: (one != "loss", one))
    return [_metric(history, one, is_wide=one == "loss" or len(names) == 1) for one in names]


def others(history: History) -> list[Figure]:
    """Return the curves of how it was learnt: learning rate, speed, norm of the gradients."""
    speed, norm = history.samples_per_second, history.gradient_norm
    figures = []
    if speed.values:
        figures.append(_single("Samples per second", speed, history.marks, from_zero=True))
    if history.learning_rates:
        figures.append(_rates(history.learning_rates, history.marks))
    if norm.values:
        figures.append(_single("Norm of the gradients", norm, history.marks))
    return figures


def _metric(history: History, metric: str, *, is_wide: bool) -> Figure:
    data: list[dict[str, Any]] = []
    keys: list[Key] = []
    note = ""
    if metric in history.means:
        data, note = _curve(history.means[metric], "training", series_colour(0))
        keys.append(Key("training", series_colour(0), "training"))
    if metric in history.validation:
        colour = series_colour(1)
        data.append(validation_trace(history.validation[metric], "validation", colour))
        keys.append(Key("validation", colour, "validation"))
    height_px = 340 if is_wide else 260
    layout = over_steps(data, history.marks)
    return Figure(name(metric), note, data, layout, height_px, tuple(keys), is_wide)


def _single(
    title: str, series: Series, marks: Sequence[Mark], *, from_zero: bool = False
) -> Figure:
    data, note = _curve(series, title.lower(), series_colour(2))
    return Figure(title, note, data, over_steps(data, marks, from_zero=from_zero), 260)


def _curve(series: Series, label: str, colour: str) -> tuple[list[dict[str, Any]], str]:
    """Return the traces of one series, and a note on what a point stands for."""
    means = [one.mean for one in series.values]
    line = curve_trace([one.middle_step for one in series.values], means, label, colour)
    left_out = _not_drawn(series)
    if series.width > 1:
        note = f"A point is the mean of {series.width} steps; the band goes from the least "
        note += f"to the greatest of them.{left_out}"
        kept = [one for one in series.values if one.mean is not None]
        steps, ends = [one.middle_step for one in kept], [(one.low, one.high) for one in kept]
        return [*band_traces(steps, ends, label, colour), line], note
    if len(means) <= _FEW:
        return [line], left_out.strip()
    reach = max(len(means) // _SMOOTH_PART, 1)
    thin = {**line, "line": {"color": colour, "width": 1}, "opacity": 0.35, "hoverinfo": "skip"}
    del thin["hovertemplate"]
    hover = line["hovertemplate"].replace("%{y:.5g}", "%{customdata:.5g} (mean %{y:.5g})")
    thick = {**line, "y": smoothed(means, reach), "customdata": means, "hovertemplate": hover}
    note = f"Thin: each step. Thick: the mean of {2 * reach + 1} neighbouring steps.{left_out}"
    return [thin, thick], note


def _not_drawn(series: Series) -> str:
    number = sum(one.num_not_finite for one in series.values)
    return f" Not finite, so not drawn: {plural(number, 'step')}." if number else ""


def validation_trace(
    validation: ValidationCurve, label: str, colour: str, **change: Any
) -> dict[str, Any]:
    """Return the trace of what evaluations said; ``change`` is as for :func:`curve_trace`."""
    marker = {"size": 7, "symbol": "diamond"}
    steps, values = validation.steps, validation.values
    return curve_trace(steps, values, label, colour, num_dots=_FEW, marker=marker, **change)


def _rates(rates: Sequence[Series], marks: Sequence[Mark]) -> Figure:
    data: list[dict[str, Any]] = []
    keys: list[Key] = []
    for group, series in enumerate(rates):
        label = f"group {group}" if len(rates) > 1 else "learning rate"
        colour = series_colour(group + 3)
        steps, means = [v.middle_step for v in series.values], [v.mean for v in series.values]
        data.append(curve_trace(steps, means, label, colour))
        keys.append(Key(label, colour, label))
    shown = tuple(keys) if len(keys) > 1 else ()
    return Figure("Learning rate", "", data, over_steps(data, marks, from_zero=True), 260, shown)


def over_steps(
    data: Sequence[dict[str, Any]], marks: Sequence[Mark] = (), *, from_zero: bool = False
) -> dict[str, Any]:
    """Return a layout whose horizontal axis counts steps, with badges at marks."""
    ends = [trace["x"][i] for trace in data for i in (0, -1) if trace["x"]]
    low, high = min(ends, default=0), max(ends, default=1)
    margin = (high - low) * 0.01 or 0.5
    end = high + 1 if marks else high  # a run ends, or fails, after its last step
    return {
        "xaxis": step_axis(low - margin, max(high + margin, end)),
        "yaxis": {"rangemode": "tozero" if from_zero else "normal"},
        **drawn_marks(marks, low, end),
    }


def step_axis(low: float, high: float) -> dict[str, Any]:
    """Return an axis that counts steps; there is none between two."""
    axis: dict[str, Any] = {"title": {"text": "step"}, "range": [low, high]}
    return axis | {"dtick": 1} if high - low < _FEW_STEPS else axis

"""Curves over the steps: metrics, learning rate, speed, norm of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.report.figure import Figure, Key, badges, drawn_badges, series_colour
from unisono.report.history import History, ValidationCurve
from unisono.report.marks import Mark
from unisono.report.series import Series, smoothed
from unisono.report.text import in_plot, name, plural

_FEW = 60  # values that are drawn as they are, with a dot each if there are fewer still
_DOTS = 30
_FEW_STEPS = 8  # so few that a tick for each has room
_SMOOTH_PART = 40  # a smoothed point is the mean of this part of all, on either side


def learning(history: History) -> list[Figure]:
    """Return the curves of what is learnt: each metric, the loss first."""
    names = sorted({*history.means, *history.validation}, key=lambda one: (one != "loss", one))
    return [
        metric(
            one,
            history.means.get(one),
            history.validation.get(one),
            numbered(history.marks),
            is_wide=one == "loss" or len(names) == 1,
        )
        for one in names
    ]


def others(history: History) -> list[Figure]:
    """Return the curves of how it was learnt: learning rate, speed, norm of the gradients."""
    marks = numbered(history.marks)
    figures = []
    if history.samples_per_second.values:
        title = "Samples per second"
        figures.append(_single(title, history.samples_per_second, marks, from_zero=True))
    if history.learning_rates:
        figures.append(_rates(history.learning_rates, marks))
    if history.gradient_norm.values:
        figures.append(_single("Norm of the gradients", history.gradient_norm, marks))
    return figures


def numbered(marks: Sequence[Mark]) -> list[tuple[int, Mark]]:
    """Number marks from 1, as the table of the page does."""
    return list(enumerate(marks, 1))


def metric(
    title: str,
    training: Series | None,
    validation: ValidationCurve | None,
    marks: Sequence[tuple[int, Mark]],
    *,
    is_wide: bool = False,
) -> Figure:
    """Return a metric's curve in training and validation."""
    data: list[dict[str, Any]] = []
    keys: list[Key] = []
    note = ""
    if training is not None:
        traces, own_keys, note = curve(training, "training", series_colour(0))
        data += traces
        keys += own_keys
    if validation is not None:
        data.append(validation_trace(validation, "validation", series_colour(1)))
        keys.append(Key("validation", series_colour(1), "validation"))
    return Figure(
        name(title),
        note,
        data,
        over_steps(data, marks),
        height_px=340 if is_wide else 260,
        keys=tuple(keys),
        is_wide=is_wide,
    )


def curve(series: Series, label: str, colour: str) -> tuple[list[dict[str, Any]], list[Key], str]:
    """Return the traces of one series, their legend, and a note on what a point stands for."""
    kept = series.values
    steps = [one.middle_step for one in kept]
    means = [one.mean for one in kept]
    group = label
    hover = f"step %{{x:,.0f}}<br>{in_plot(label)}: %{{y:.5g}}<extra></extra>"
    line: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if len(kept) <= _DOTS else "lines",
        "x": steps,
        "y": means,
        "line": {"color": colour, "width": 1.8},
        "marker": {"size": 5, "color": colour},
        "hovertemplate": hover,
        "legendgroup": group,
    }
    left_out = _not_drawn(series)
    if series.width > 1:
        note = f"A point is the mean of {series.width} steps; the band goes from the least to the "
        note += f"greatest of them.{left_out}"
        return [*_band(series, colour, group), line], [Key(label, colour, group)], note
    if len(kept) <= _FEW:
        return [line], [Key(label, colour, group)], left_out.strip()
    reach = max(len(kept) // _SMOOTH_PART, 1)
    thin = {**line, "line": {"color": colour, "width": 1}, "opacity": 0.35, "hoverinfo": "skip"}
    del thin["hovertemplate"]
    thick = {**line, "y": smoothed(means, reach), "customdata": means}
    thick["hovertemplate"] = hover.replace("%{y:.5g}", "%{customdata:.5g} (mean %{y:.5g})")
    note = f"Thin: each step. Thick: the mean of {2 * reach + 1} neighbouring steps.{left_out}"
    return [thin, thick], [Key(label, colour, group)], note


def _not_drawn(series: Series) -> str:
    number = sum(one.num_not_finite for one in series.values)
    return f" Not finite, so not drawn: {plural(number, 'step')}." if number else ""


def _band(series: Series, colour: str, group: str) -> list[dict[str, Any]]:
    kept = [one for one in series.values if one.mean is not None]
    common: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "x": [one.middle_step for one in kept],
        "line": {"width": 0, "color": colour},
        "opacity": 0.25,
        "hoverinfo": "skip",
        "legendgroup": group,
    }
    return [
        {**common, "y": [one.low for one in kept]},
        {
            **common,
            "y": [one.high for one in kept],
            "fill": "tonexty",
            "fillcolor": colour.replace("var(--s", "var(--band"),
        },
    ]


def validation_trace(validation: ValidationCurve, label: str, colour: str) -> dict[str, Any]:
    """Return the trace of what evaluations said."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(validation.steps) <= _FEW else "lines",
        "x": validation.steps,
        "y": validation.values,
        "line": {"color": colour, "width": 1.8, "dash": "solid"},
        "marker": {"size": 7, "color": colour, "symbol": "diamond"},
        "hovertemplate": f"step %{{x:,.0f}}<br>{in_plot(label)}: %{{y:.5g}}<extra></extra>",
        "legendgroup": label,
    }


def over_steps(
    data: Sequence[dict[str, Any]],
    marks: Sequence[tuple[int, Mark]] = (),
    *,
    from_zero: bool = False,
) -> dict[str, Any]:
    """Return a layout whose horizontal axis counts steps, with badges at marks."""
    ends = [trace["x"][i] for trace in data for i in (0, -1) if trace["x"]]
    low, high = min(ends, default=0), max(ends, default=1)
    margin = (high - low) * 0.01 or 0.5
    placed = [(float(mark.step), number, mark) for number, mark in marks]
    end = high + 1 if marks else high  # a run ends, or fails, after its last step
    return {
        "xaxis": step_axis(low - margin, max(high + margin, end)),
        "yaxis": {"rangemode": "tozero" if from_zero else "normal"},
        "hovermode": "closest",
        **drawn_badges(badges(placed, low, end), is_above=True),
    }


def step_axis(low: float, high: float) -> dict[str, Any]:
    """Return an axis that counts steps; there is none between two."""
    axis: dict[str, Any] = {"title": {"text": "step"}, "range": [low, high]}
    return axis | {"dtick": 1} if high - low < _FEW_STEPS else axis


def _single(
    title: str, series: Series, marks: Sequence[tuple[int, Mark]], *, from_zero: bool = False
) -> Figure:
    traces, _, note = curve(series, title.lower(), series_colour(2))
    return Figure(title, note, traces, over_steps(traces, marks, from_zero=from_zero), 260)


def _rates(rates: Sequence[Series], marks: Sequence[tuple[int, Mark]]) -> Figure:
    data: list[dict[str, Any]] = []
    keys: list[Key] = []
    for group, series in enumerate(rates):
        label = f"group {group}" if len(rates) > 1 else "learning rate"
        colour = series_colour(group + 3)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(series.values) <= _DOTS else "lines",
                "x": [one.middle_step for one in series.values],
                "y": [one.mean for one in series.values],
                "line": {"color": colour, "width": 1.8},
                "marker": {"size": 5},
                "hovertemplate": f"step %{{x:,.0f}}<br>{label}: %{{y:.5g}}<extra></extra>",
                "legendgroup": label,
            }
        )
        keys.append(Key(label, colour, label))
    shown = tuple(keys) if len(keys) > 1 else ()
    return Figure("Learning rate", "", data, over_steps(data, marks, from_zero=True), 260, shown)

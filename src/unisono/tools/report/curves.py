"""The plots of a run: curves over its steps, and bars that show where its time goes.

Figures are traces and a layout in plotly's JSON format. Colours are names in the page's style
sheet; the page's script inserts them, and the settings that all plots share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.runtime.notices import plural
from unisono.tools.report.history import History, Series
from unisono.tools.report.text import in_plot, name
from unisono.training.events.events import PHASES

SERIES_COLOURS = 8


@dataclass(frozen=True)
class Figure:
    """A plot with its words, which are plain text."""

    title: str
    note: str
    data: list[dict[str, Any]]  # plotly's traces
    layout: dict[str, Any]  # plotly's
    height_px: int = 280
    is_wide: bool = False  # whether it takes the whole width of the page

    @property
    def spec(self) -> dict[str, Any]:
        """The specification that plotly draws."""
        return {"data": self.data, "layout": self.layout}


def series_colour(number: int) -> str:
    """Return the colour of the n-th curve."""
    return f"var(--s{number % SERIES_COLOURS})"


def small(found: Any) -> Any:
    """Return a value with six digits per number, and null for numbers that JSON lacks."""
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    if isinstance(found, dict):
        return {key: small(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [small(value) for value in found]
    return found


DIAMONDS: dict[str, Any] = {"num_dots": 60, "marker": {"size": 7, "symbol": "diamond"}}


def learning(history: History) -> list[Figure]:
    """Return the curves of the metrics, the loss first."""
    names = sorted({*history.means, *history.validation}, key=lambda one: (one != "loss", one))
    return [_metric(history, one, is_wide=one == "loss" or len(names) == 1) for one in names]


def others(history: History) -> list[Figure]:
    """Return the curves of speed, learning rate and the norm of the gradients."""
    figures = [
        _single("Samples per second", history.samples_per_second, from_zero=True),
        _single("Learning rate", history.learning_rate, from_zero=True),
        _single("Norm of the gradients", history.numbers["gradient_norm"]),
    ]
    return [figure for figure in figures if figure.data[0]["x"]]


def _metric(history: History, metric: str, *, is_wide: bool) -> Figure:
    data: list[dict[str, Any]] = []
    note = ""
    if metric in history.means:
        series = history.means[metric]
        data, note = [series_trace(series, "training", series_colour(0))], _note(series)
    if metric in history.validation:
        validation = history.validation[metric]
        data.append(series_trace(validation, "validation", series_colour(1), **DIAMONDS))
    height_px = 340 if is_wide else 260
    return Figure(name(metric), note, data, over_steps(data), height_px, is_wide)


def _single(title: str, series: Series, *, from_zero: bool = False) -> Figure:
    data = [series_trace(series, title.lower(), series_colour(2))]
    return Figure(title, _note(series), data, over_steps(data, from_zero=from_zero), 260)


def series_trace(
    series: Series,
    label: str,
    colour: str,
    *,
    width: float = 1.8,
    num_dots: int = 30,
    **change: Any,
) -> dict[str, Any]:
    """Return the trace of a series over steps, with a dot for each value if there are `num_dots`.

    `change` overrides entries of the trace, in plotly's format.
    """
    steps = [one.middle_step for one in series.values]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) <= num_dots else "lines",
        "x": steps,
        "y": [one.mean for one in series.values],
        "line": {"color": colour, "width": width},
        "marker": {"size": 5},
        "hovertemplate": f"step %{{x:,.0f}}<br>{in_plot(label)}: %{{y:.5g}}<extra></extra>",
        "name": in_plot(label),
        **change,
    }


def _note(series: Series) -> str:
    """Return what a point of a curve stands for, and what is missing."""
    notes = [f"A point is the mean of {series.width} steps."] if series.width > 1 else []
    if number := sum(one.num_not_finite for one in series.values):
        notes.append(f"Not finite, so not drawn: {plural(number, 'step')}.")
    return " ".join(notes)


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
    """Return an axis that counts steps."""
    return {"title": {"text": "step"}, "range": [low, high]}


def by_phase(history: History) -> Figure:
    """Return how long each phase of a step took, over the run."""
    phases = history.phases.over_steps
    stretches, width = phases["between"].values, phases["between"].width
    data = [
        _bars(
            phase,
            f"step %{{x:,.0f}}<br>{phase}: %{{y:.3g}} ms",
            x=[one.first_step for one in stretches],
            y=[(one.mean or 0.0) * 1e3 for one in series.values],
            width=[max(one.last_step - one.first_step + 1, 1) for one in stretches],
            offset=0,
        )
        for phase, series in phases.items()
    ]
    layout: dict[str, Any] = {
        "xaxis": step_axis(stretches[0].first_step, stretches[-1].last_step + 1),
        "yaxis": {"title": {"text": "ms"}},
        "barmode": "stack",
        "bargap": 0,
    }
    note = "A step's time, in the mean of the workers"
    note += f" and of {width} steps a bar." if width > 1 else "."
    return Figure("Over the run", note, data, layout, 300, is_wide=True)


def by_worker(history: History) -> Figure:
    """Return how long each phase of a step took in each worker."""
    spent = history.phases.by_rank
    ranks = sorted(spent)
    data = [
        _bars(
            phase,
            f"%{{y}}<br>{phase}: %{{x:.3g}} ms a step",
            orientation="h",
            y=[f"worker {rank}" for rank in ranks],
            x=[spent[rank].phases_s[i] / spent[rank].num_steps * 1e3 for rank in ranks],
        )
        for i, phase in enumerate(PHASES)
    ]
    layout = {
        "xaxis": {"title": {"text": "ms a step"}},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True},
        "barmode": "stack",
        "bargap": 0.25,
    }
    note = "A step's time in each worker, in the mean of the steps that it took part in."
    height_px = 96 + 26 * max(len(ranks), 2)
    return Figure("By worker", note, data, layout, height_px, is_wide=True)


def _bars(phase: str, hover: str, **rest: Any) -> dict[str, Any]:
    return {
        "type": "bar",
        "marker": {"color": f"var(--{phase})", "line": {"width": 0}},
        "hovertemplate": f"{hover}<extra></extra>",
        "name": phase,
        **rest,
    }

"""What is drawn: traces and a layout as plotly's JSON describes them, with a legend in HTML.

Colours are names of the page's own, such as ``var(--loss)``: the style sheet says what they are by
day and by night, and the page's script puts them in, as it does with what all plots have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.report.marks import Mark
from unisono.report.text import in_plot

SERIES_COLOURS = 8
_NEAR = 0.022  # of an axis: two badges nearer than this would lie upon each other
_MAX_TEXTS = 8


@dataclass(frozen=True)
class Key:
    """An entry of a legend. A click on it hides the traces of its group."""

    label: str
    colour: str
    group: str


@dataclass(frozen=True)
class Figure:
    """A plot with its words, which are plain text."""

    title: str
    note: str
    data: list[dict[str, Any]]  # plotly's traces
    layout: dict[str, Any]  # plotly's; the page's script adds fonts, margins and colours
    height_px: int = 280
    keys: tuple[Key, ...] = ()  # its legend
    is_wide: bool = False  # whether it takes the whole width of the page

    @property
    def spec(self) -> dict[str, Any]:
        """What plotly draws."""
        return {"data": self.data, "layout": self.layout}


def series_colour(number: int) -> str:
    """Return the colour of the n-th curve."""
    return f"var(--s{number % SERIES_COLOURS})"


def curve_trace(
    xs: Sequence[float],
    ys: Sequence[float | None],
    label: str,
    colour: str,
    *,
    width: float = 1.8,
    num_dots: int = 30,
    **change: Any,
) -> dict[str, Any]:
    """Return the trace of a curve over steps, with a dot for each value where there are few.

    Args:
        xs: the steps.
        ys: the values.
        label: what they are.
        colour: its colour.
        width: of the line, in pixels.
        num_dots: so many values are few.
        change: what is otherwise, in plotly's words.
    """
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(xs) <= num_dots else "lines",
        "x": xs,
        "y": ys,
        "line": {"color": colour, "width": width},
        "marker": {"size": 5},
        "hovertemplate": f"step %{{x:,.0f}}<br>{in_plot(label)}: %{{y:.5g}}<extra></extra>",
        "legendgroup": label,
        **change,
    }


def band_traces(
    xs: Sequence[float], pairs: Sequence[Sequence[float]], label: str, colour: str
) -> list[dict[str, Any]]:
    """Return the traces of a band between two curves.

    Args:
        xs: the steps.
        pairs: the lower and the upper end at each.
        label: what it belongs to.
        colour: that of what it belongs to, such as ``var(--s0)``.
    """
    common: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "x": xs,
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "legendgroup": label,
    }
    fill = {"fill": "tonexty", "fillcolor": colour.replace("var(--s", "var(--band")}
    low, high = ([pair[i] for pair in pairs] for i in (0, 1))
    return [{**common, "y": low}, {**common, "y": high, **fill}]


def drawn_marks(marks: Sequence[Mark], low: float, high: float) -> dict[str, Any]:
    """Return the part of a layout that draws marks: a line each, and a badge above the plot.

    Badges have the numbers of marks, from 1; marks that are near each other share one.

    Args:
        marks: all of a run.
        low: the first step on the axis.
        high: the last one.
    """
    groups: list[list[tuple[int, Mark]]] = []
    for number, mark in sorted(enumerate(marks, 1), key=lambda one: (one[1].step, one[0])):
        if low <= mark.step <= high:
            if not groups or mark.step - groups[-1][0][1].step > _NEAR * (high - low):
                groups.append([])
            groups[-1].append((number, mark))
    badges = [_badge(group) for group in groups]
    return {
        "shapes": [{"x0": b["x"], "x1": b["x"], "line": {"color": b["bgcolor"]}} for b in badges],
        "annotations": badges,
    }


def _badge(group: Sequence[tuple[int, Mark]]) -> dict[str, Any]:
    (first, mark), (last, _) = group[0], group[-1]
    texts = [in_plot(f"{number}: {one.text}") for number, one in group[:_MAX_TEXTS]]
    return {
        "x": mark.step,
        "yanchor": "bottom",
        "text": str(first) if first == last else f"{first}–{last}",
        "hovertext": "<br>".join(texts),
        "bgcolor": f"var(--{mark.severity.value or 'muted'})",
    }


def small(found: Any) -> Any:
    """Give the same with six digits of each number, and null for what JSON has no number for."""
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    if isinstance(found, dict):
        return {key: small(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [small(value) for value in found]
    return found

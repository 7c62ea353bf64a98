"""What is drawn: traces and a layout as plotly's JSON describes them, with a legend in HTML.

Colours are names of the page's own, such as ``var(--loss)``: the style sheet says what they are by
day and by night, and the page's script puts them in, as it does with what all plots have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.report.text import in_plot

SERIES_COLOURS = 8


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


def small(found: Any) -> Any:
    """Give the same with six digits of each number, and null for what JSON has no number for."""
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    if isinstance(found, dict):
        return {key: small(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [small(value) for value in found]
    return found

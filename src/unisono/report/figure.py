"""What is drawn: traces and a layout as plotly's JSON describes them, with a legend in HTML.

Colours are names of the page's own, such as ``var(--loss)``: the style sheet says what they are by
day and by night, and the page's script puts them in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.report.marks import Kind, Mark
from unisono.report.text import in_plot

SERIES_COLOURS = 8
_NEAR = 0.022  # of an axis: two badges nearer than this would lie upon each other
_MARK_COLOURS = {
    Kind.LOST: "var(--bad)",
    Kind.FAILED: "var(--bad)",
    Kind.NOT_FINITE: "var(--bad)",
    Kind.WENT_BACK: "var(--warn)",
    Kind.JOINED: "var(--good)",
}


@dataclass(frozen=True)
class Key:
    """An entry of a legend. A click on it hides the traces of its group."""

    label: str
    colour: str
    group: str


@dataclass(frozen=True)
class Figure:
    """A plot with its words.

    Attributes:
        title: its heading, as plain text.
        note: what is to be known of it, as plain text.
        data: plotly's traces.
        layout: plotly's layout; the page's script adds fonts, margins and colours.
        height_px: its height.
        keys: its legend.
        is_wide: whether it takes the whole width of the page.
        is_long: whether it is pushed from side to side where the page is narrow.
    """

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height_px: int = 280
    keys: tuple[Key, ...] = ()
    is_wide: bool = False
    is_long: bool = False


@dataclass(frozen=True)
class Badge:
    """The numbers of marks that lie near each other on an axis."""

    at: float
    first: int
    last: int
    colour: str
    texts: tuple[str, ...] = field(default=())

    @property
    def label(self) -> str:
        """The number, or the first and the last."""
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


def colour_of(kind: Kind) -> str:
    """Return the colour of a kind of mark."""
    return _MARK_COLOURS.get(kind, "var(--muted)")


def series_colour(number: int) -> str:
    """Return the colour of the n-th curve."""
    return f"var(--s{number % SERIES_COLOURS})"


def badges(marks: Sequence[tuple[float, int, Mark]], low: float, high: float) -> list[Badge]:
    """Number the marks of an axis; those that are near each other share a badge.

    Args:
        marks: where each lies on the axis, its number, and what it is.
        low: where the axis begins.
        high: where it ends.
    """
    found: list[Badge] = []
    for at, number, mark in sorted(marks, key=lambda one: one[:2]):
        if not low <= at <= high:
            continue
        text = in_plot(f"{number}: {mark.text}")
        if found and at - found[-1].at <= _NEAR * (high - low):
            last = found[-1]
            texts = (*last.texts, text)[:8]
            found[-1] = Badge(last.at, last.first, number, last.colour, texts)
        else:
            found.append(Badge(at, number, number, colour_of(mark.kind), (text,)))
    return found


def drawn_badges(found: Sequence[Badge], *, is_above: bool = False) -> dict[str, Any]:
    """Return the part of a layout that draws badges: a line each, and its number at the top.

    Args:
        found: the badges.
        is_above: whether the numbers stand above the plot, not in it.
    """
    return {
        "shapes": [
            {
                "type": "line",
                "x0": badge.at,
                "x1": badge.at,
                "y0": 0,
                "y1": 1,
                "yref": "y domain",
                "line": {"color": badge.colour, "width": 1, "dash": "dot"},
            }
            for badge in found
        ],
        "annotations": [
            {
                "x": badge.at,
                "y": 1,
                "yref": "y domain",
                "yanchor": "bottom" if is_above else "top",
                "text": badge.label,
                "hovertext": "<br>".join(badge.texts),
                "showarrow": False,
                "font": {"size": 10, "color": "var(--surface)"},
                "bgcolor": badge.colour,
                "borderpad": 2,
            }
            for badge in found
        ],
    }


def as_json(figures: Sequence[Figure]) -> str:
    """Return figures as JSON that may stand in a script element.

    Numbers keep six digits; what is not finite becomes null.
    """
    specs = [{"data": _small(one.data), "layout": _small(one.layout)} for one in figures]
    text = json.dumps(specs, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # Nothing in it can end the element, or begin a comment.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _small(found: Any) -> Any:
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    if isinstance(found, dict):
        return {key: _small(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_small(value) for value in found]
    return found

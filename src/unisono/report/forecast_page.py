"""A forecast as a page for a browser: the curve beside the ideal line, and what it consists of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.report.document import MARK, Page, footer, section, table
from unisono.report.figure import Figure, Key, band_traces, curve_trace, series_colour
from unisono.report.files import write_whole
from unisono.report.forecast_table import columns_of
from unisono.report.text import in_page

_IDEAL, _EXPECTED = "ideal", "expected"


def write_forecast(path: str | os.PathLike[str], found: Mapping[str, Any]) -> Path:
    """Write the page of a forecast.

    Args:
        path: the page.
        found: the forecast, as ``unisono plan --json`` prints it.

    Returns:
        Where it is.

    Raises:
        ValueError: the page cannot be written, or plotly is missing.
    """
    return write_whole(path, [forecast_page(found)], mark=MARK, option="-o")


def forecast_page(found: Mapping[str, Any]) -> str:
    """Return the page of a forecast."""
    page = Page()
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    places = page.place([_speed_up(rows), _causes(rows)])
    columns = list(columns_of(found))
    cells = ("".join(f"<td>{in_page(column.cell(row))}</td>" for column in columns) for row in rows)
    causes = "".join(
        f"<li>{in_page(cause)}: {in_page(words)}</li>" for cause, words in found["causes"].items()
    )
    sentences = "".join(f"<li>{in_page(sentence)}</li>" for sentence in found["assumptions"])
    name = found["program"] or "a device as given"
    body = [
        f"<header><h1>Forecast</h1><p>{in_page(name)}</p></header>",
        section("Speed-up", places),
        section(
            "Numbers",
            table(cells, [column.head for column in columns], min_width_px=760),
            f"<ul>{causes}</ul>" if causes else "",
        ),
        section("What is supposed", f"<ul>{sentences}</ul>"),
        footer(),
    ]
    return page.document("Unisono: forecast", body)


def _speed_up(rows: Sequence[Mapping[str, Any]]) -> Figure:
    workers = [row["workers"] for row in rows]
    of_row = "%{x:,.0f} workers<br>"
    colour = series_colour(0)
    ideal = curve_trace(
        workers,
        workers,
        _IDEAL,
        "var(--muted)",
        line={"color": "var(--muted)", "width": 1.5, "dash": "dash"},
        hovertemplate=f"{of_row}ideal: %{{y:,.5g}}<extra></extra>",
    )
    expected = curve_trace(
        workers,
        [row["speed_up"] for row in rows],
        _EXPECTED,
        colour,
        hovertemplate=f"{of_row}expected: %{{y:,.4g}}<extra></extra>",
    )
    note = "Samples a second over those of one worker; both scales are logarithmic."
    data, bands = [ideal, expected], [row["speed_up_band"] for row in rows]
    if None not in bands:
        data = [*band_traces(workers, bands, _EXPECTED, colour), *data]
        note += " The band is what 90 % of the resampled measurements give."
    axes = {
        "xaxis": {"type": "log", "title": {"text": "workers"}, **_ticks(workers)},
        "yaxis": {"type": "log", "title": {"text": "speed-up"}},
    }
    keys = (Key(_IDEAL, "var(--muted)", _IDEAL), Key(_EXPECTED, colour, _EXPECTED))
    return Figure("Speed-up and the ideal line", note, data, axes, 380, keys, is_wide=True)


def _causes(rows: Sequence[Mapping[str, Any]]) -> Figure:
    names = list(rows[0]["causes_s"])
    shown = [name for name in names if any(row["causes_s"][name] > 0 for row in rows)]
    keys = tuple(Key(name, series_colour(at), name) for at, name in enumerate(shown))
    data = [
        {
            "type": "bar",
            "x": [f"{row['workers']:,}" for row in rows],
            "y": [max(row["causes_s"][key.label], 0.0) * 1e3 for row in rows],
            "marker": {"color": key.colour},
            "hovertemplate": f"%{{x}} workers<br>{key.label}: %{{y:.4g}} ms<extra></extra>",
            "legendgroup": key.group,
        }
        for key in keys
    ]
    axes = {
        "barmode": "stack",
        "xaxis": {"type": "category", "title": {"text": "workers"}},
        "yaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"},
    }
    note = "The ideal time of a step, and what each cause adds to it."
    return Figure("What a step consists of", note, data, axes, 340, keys, is_wide=True)


def _ticks(workers: Sequence[int]) -> dict[str, Any]:
    return {"tickvals": list(workers), "ticktext": [f"{number:,}" for number in workers]}

"""One HTML page that holds all it needs and can ask nobody for anything.

The page's policy lets a browser run its two scripts, known by their hashes, and load nothing: no
script that got into the text would run, and no request would leave.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from string import Template

from unisono.report.figure import Figure, Key, as_json
from unisono.report.text import in_page, moment

MARK = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="Unisono">\n'
_MISSING = (
    "To draw a page, plotly must be installed, but is not: install it with "
    "`pip install 'unisono[report]'`."
)


class MissingLibraryError(ValueError):
    """The library that draws is not installed."""


class Page:
    """What is on a page so far; figures are numbered as they come."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def place(self, figures: Sequence[Figure]) -> str:
        """Add figures and return their places in the page."""
        first = len(self.figures)
        self.figures += _without_gap(figures)
        places = [_figure_html(one, first + i) for i, one in enumerate(self.figures[first:])]
        return '<div class="figures">' + "\n".join(places) + "</div>" if places else ""

    def document(self, title: str, body: Iterable[str]) -> str:
        """Put the page together.

        Args:
            title: what the browser calls it.
            body: HTML, with the places of all figures.

        Raises:
            MissingLibraryError: plotly is not installed.
        """
        library, script = _plotly(), _resource("page.js")
        hashes = " ".join(f"'sha256-{_hash(text)}'" for text in (library, script))
        return MARK + Template(_resource("page.html")).substitute(
            title=in_page(title),
            policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'",
            style=_resource("page.css"),
            body="\n".join(body),
            figures=as_json(self.figures),
            library=library,
            script=script,
        )


def _without_gap(figures: Sequence[Figure]) -> list[Figure]:
    """Widen the last of an odd number of figures that come in pairs."""
    pairs = [i for i, figure in enumerate(figures) if not figure.is_wide]
    widened = pairs[-1] if len(pairs) % 2 else None
    return [replace(one, is_wide=True) if i == widened else one for i, one in enumerate(figures)]


def _figure_html(figure: Figure, number: int) -> str:
    note = f"<p>{in_page(figure.note)}</p>" if figure.note else ""
    kind = ' class="wide"' if figure.is_wide else ""
    plot = (
        f'<div class="plot" role="img" aria-label="{in_page(figure.title)}" '
        f'style="height:{figure.height_px}px"></div>'
    )
    return (
        f"<figure{kind}><figcaption><h3>{in_page(figure.title)}</h3>{note}"
        f"{legend_html(figure.keys, (number,))}</figcaption>"
        f'<div class="scroll">{plot}</div></figure>'
    )


def legend_html(keys: Sequence[Key], plots: Sequence[int]) -> str:
    """Return a legend whose entries show and hide traces.

    Args:
        keys: its entries.
        plots: the numbers of the figures that it belongs to.
    """
    if not keys:
        return ""
    numbers = " ".join(map(str, plots))
    entries = [
        f'<button type="button" aria-pressed="true" data-group="{in_page(key.group)}" '
        f'data-plots="{numbers}"><i style="background:{key.colour}"></i>{in_page(key.label)}'
        "</button>"
        for key in keys
    ]
    return f'<div class="legend">{"".join(entries)}</div>'


def section(title: str, *parts: str) -> str:
    """Return a part of the page under a heading."""
    return f"<section>\n<h2>{in_page(title)}</h2>\n" + "\n".join(filter(None, parts)) + "</section>"


def table(rows: Iterable[str], heads: Sequence[str] = (), *, min_width_px: int = 0) -> str:
    """Return a table.

    Args:
        rows: the cells of each row, as HTML.
        heads: what stands above the columns, as plain text; empty for none.
        min_width_px: where the page is narrower, the table is pushed from side to side; 0: never.
    """
    head = "".join(f"<th>{in_page(one)}</th>" for one in heads)
    head = f"<thead><tr>{head}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    if not min_width_px:
        return f"<table>{head}<tbody>{body}</tbody></table>"
    made = f'<table style="min-width:{min_width_px}px">{head}<tbody>{body}</tbody></table>'
    return f'<div class="scroll">{made}</div>'


def cells(name: str, *values: str) -> str:
    """Return a row of a table: its name, and values; all are plain text."""
    shown = "".join(f"<td>{in_page(value)}</td>" for value in values)
    return f'<th scope="row">{in_page(name)}</th>{shown}'


def footer(*said: str) -> str:
    """Return what stands at the end of each page, and what else is to be said there."""
    made = f"Made by Unisono at {moment(datetime.now(UTC).timestamp())}."
    alone = "This page holds all that it shows and asks the network for nothing."
    return f"<footer><p>{in_page(' '.join([made, alone, *said]))}</p></footer>"


def check_library() -> None:
    """Find out whether pages can be drawn here.

    Raises:
        MissingLibraryError: plotly is not installed.
    """
    _plotly()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingLibraryError(_MISSING) from None
    library: str = get_plotlyjs()
    return library


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _resource(name: str) -> str:
    return resources.files("unisono.report").joinpath(name).read_text(encoding="utf-8")

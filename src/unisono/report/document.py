"""One HTML page that holds all it needs and can ask nobody for anything.

The page's policy lets a browser run its two scripts, known by their hashes, and load nothing: no
script that got into the text would run, and no request would leave.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

from unisono.report.figure import Figure, Key, as_json
from unisono.report.text import in_page

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
        places = [figure_html(one, first + i) for i, one in enumerate(self.figures[first:])]
        return '<div class="figures">' + "\n".join(places) + "</div>" if places else ""


def _without_gap(figures: Sequence[Figure]) -> list[Figure]:
    """Widen the last of an odd number of figures that come in pairs."""
    pairs = [i for i, figure in enumerate(figures) if not figure.is_wide]
    widened = pairs[-1] if len(pairs) % 2 else None
    return [replace(one, is_wide=True) if i == widened else one for i, one in enumerate(figures)]


def document(title: str, body: Sequence[str], figures: Sequence[Figure]) -> str:
    """Put a page together.

    Args:
        title: what the browser calls it.
        body: HTML; each figure's place in it is what :func:`figure_html` returned.
        figures: what is drawn there, in the same order.

    Raises:
        MissingLibraryError: plotly is not installed.
    """
    library, script = _plotly(), _resource("page.js")
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in (library, script))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return "".join(
        [
            MARK,
            '<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{in_page(title)}</title>\n<style>\n{_resource('page.css')}</style>\n",
            "</head>\n<body>\n<main>\n",
            "\n".join(body),
            "\n</main>\n<noscript><p>The plots are drawn by a script in this page.</p></noscript>",
            f'\n<script type="application/json" id="figures">{as_json(figures)}</script>\n',
            f"<script>{library}</script>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def figure_html(figure: Figure, number: int) -> str:
    """Return the place where a figure will be drawn, with its words.

    Args:
        figure: the figure.
        number: which of the page's figures it is, from 0.
    """
    note = f"<p>{in_page(figure.note)}</p>" if figure.note else ""
    kind = ' class="wide"' if figure.is_wide else ""
    plot = (
        f'<div class="plot{" long" if figure.is_long else ""}" role="img" '
        f'aria-label="{in_page(figure.title)}" style="height:{figure.height_px}px"></div>'
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


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values; both are plain text."""
    body = "".join(
        f'<tr><th scope="row">{in_page(key)}</th><td>{in_page(value)}</td></tr>'
        for key, value in rows
    )
    return f"<table><tbody>{body}</tbody></table>"


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

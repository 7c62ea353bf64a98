"""How are numbers, times and other people's words shown?

Whatever comes out of a file passes through :func:`plain`, and then through :func:`html.escape` on
its way into the page or :func:`in_plot` on its way into a plot, whose texts know a few tags.
"""

from __future__ import annotations

import html
import json
import math
from datetime import UTC, datetime

from unisono.notices import shown_lines

MAX_TEXT = 2000
MAX_NAME = 60
# What the word of a command ends with that names the program; those before it start it.
SCRIPTS = (".py", ".ipynb")


def plain(text: object, max_chars: int = MAX_TEXT) -> str:
    """Return text in which nothing is hidden: control and direction characters are written out."""
    shown = str(text)
    return shown_lines(shown if len(shown) <= max_chars else shown[: max_chars - 1] + "…")


def name(text: object) -> str:
    """Return a short name on one line."""
    return plain(text, MAX_NAME).replace("\n", " ")


def in_page(text: object) -> str:
    """Return text as HTML that shows it."""
    return html.escape(plain(text))


def in_plot(text: object) -> str:
    """Return a name as plotly's markup that shows it."""
    return html.escape(name(text), quote=False)


def value(found: object) -> str:
    """Return a JSON value in few words."""
    if isinstance(found, str):
        return found
    if isinstance(found, bool):
        return "yes" if found else "no"
    if found is None:
        return "none"
    if isinstance(found, int):
        return str(found)
    return json.dumps(found, ensure_ascii=False, allow_nan=True)[:MAX_TEXT]


def count(number: float) -> str:
    """Return a count with its thousands apart."""
    return f"{number:,.0f}".replace(",", "\u202f") if abs(number) < 1e12 else f"{number:.3g}"


def amount(number: float | None) -> str:
    """Return a measured value with a few digits."""
    if number is None:
        return "–"
    if not math.isfinite(number):
        return {math.inf: "∞", -math.inf: "−∞"}.get(number, "NaN")
    return count(number) if 1e4 <= abs(number) < 1e12 else f"{number:.4g}"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as people write it."""
    return f"{share * 100:.{digits}f} %"


def size(num_bytes: int | None) -> str:
    """Write a number of bytes in at most seven cells."""
    if num_bytes is None:
        return "–"
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float | None) -> str:
    """Return a time in the units that one would say it in."""
    if seconds is None or not 0 <= seconds < math.inf:
        return "–"  # clocks are put back at times
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def moment(unix_s: float | None) -> str:
    """Return a point in time, in UTC."""
    if unix_s is None:
        return "–"
    try:
        at = datetime.fromtimestamp(unix_s, UTC)
    except (ValueError, OverflowError, OSError):
        return "–"
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(number: int, word: str) -> str:
    """Return a count with its noun."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"

"""Notices for the user, with safe display of names that others chose.

Counts, sizes, times and shares are formatted the same way wherever they are shown. Sizes are binary
(1 GiB is 2**30 bytes), as in torch's own messages about memory.
"""

from __future__ import annotations

import contextlib
import math
import sys
import unicodedata
from collections.abc import Iterable, Sequence

# Control and direction characters, halves of surrogates, line separators: not visible as such.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_NAME_CHARS_AT_MOST = 200


def say(line: str) -> None:
    """Print a line at once, on a separate line even beside a progress bar; never fails."""
    stream = sys.stderr  # or the program's replacement for it, which may do anything
    with contextlib.suppress(Exception):
        start = "\r\x1b[2K" if hasattr(stream, "isatty") and stream.isatty() else ""
        stream.write(f"{start}unisono: {shown_lines(line)}\n")
        stream.flush()


def listed(word: str, items: Iterable[object], last: str = ", ") -> str:
    """Return ``rank 1``, or ``ranks 0, 1, 2``; `last` precedes the last of several items."""
    *most, end = map(str, items)
    return f"{word}s {', '.join(most)}{last}{end}" if most else f"{word} {end}"


def named(names: Sequence[object], at_most: int = 8) -> str:
    """Return names, shortened to the first ones if there are many: ``` `a`, `b` and 3 more ```."""
    told = ", ".join(f"`{shown(name, 100)}`" for name in names[:at_most])
    more = len(names) - at_most
    return f"{told} and {more} more" if more > 0 else told


def text_of(value: object) -> str:
    """Return ``str(value)``; empty if the program's ``__str__`` raises."""
    try:
        return str(value)
    except Exception:
        return ""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to the program's exception, unless its class forbids new attributes."""
    with contextlib.suppress(Exception):
        error.add_note(note)


def shown(text: object, max_chars: int = _NAME_CHARS_AT_MOST) -> str:
    """Escape what a terminal would hide or interpret in a foreign name, and shorten it."""
    name = str(text)
    if name.isprintable() and len(name) <= max_chars:
        return name
    if len(name) > max_chars:
        name = name[: max_chars - 1] + "…"
    return "".join(map(_shown, name))


def shown_lines(text: str) -> str:
    """Escape a whole text in the same way, but keep its lines."""
    return "\n".join(shown(line, len(line)) for line in text.split("\n"))


def can_show(text: str, encoding: str) -> bool:
    """Return whether a terminal's encoding has all characters of a text."""
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


UNKNOWN = "–"


def count(number: float) -> str:
    """Format a count with separated thousands."""
    return f"{number:,.0f}".replace(",", "\u202f") if abs(number) < 1e12 else f"{number:.3g}"


def plural(number: int, word: str) -> str:
    """Format a count with its noun."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def amount(number: float | None) -> str:
    """Format a measured value with a few digits."""
    if number is None:
        return UNKNOWN
    if not math.isfinite(number):
        return {math.inf: "∞", -math.inf: "−∞"}.get(number, "NaN")
    return count(number) if 1e4 <= abs(number) < 1e12 else f"{number:.4g}"


def decimal(number: float) -> str:
    """Format a mean with four decimals, or four digits if it is too small or large for those."""
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e9 else f"{number:.4g}"


def percent(share: float) -> str:
    """Format a share as a percentage."""
    return f"{share * 100:.0f} %"


def size(num_bytes: float | None) -> str:
    """Format a number of bytes, such as ``310 MiB``, in at most eight characters."""
    if num_bytes is None:
        return UNKNOWN
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def duration(seconds: float | None) -> str:
    """Format a time in the most readable units."""
    if seconds is None or not 0 <= seconds < math.inf:
        return UNKNOWN  # clocks are sometimes set back
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

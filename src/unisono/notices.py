"""Notices for the user, and names in them that others chose."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from collections.abc import Iterable, Sequence

# Control and direction characters, halves of surrogates, line separators: what is not seen as such.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_NAME_CHARS_AT_MOST = 200


def say(line: str) -> None:
    """Show a line at once, on a line of its own even beside a progress bar; never fails."""
    stream = sys.stderr  # or what the program has put in its place, which may do anything
    with contextlib.suppress(Exception):
        start = "\r\x1b[2K" if hasattr(stream, "isatty") and stream.isatty() else ""
        stream.write(f"{start}unisono: {shown_lines(line)}\n")
        stream.flush()


def listed(word: str, items: Iterable[object], last: str = ", ") -> str:
    """Write ``rank 1``, or ``ranks 0, 1, 2``; `last` stands before the last of several."""
    *most, end = map(str, items)
    return f"{word}s {', '.join(most)}{last}{end}" if most else f"{word} {end}"


def named(names: Sequence[object], at_most: int = 8) -> str:
    """Write names, the first of them where there are more: ``` `a`, `b` and 3 more ```."""
    told = ", ".join(f"`{shown(name, 100)}`" for name in names[:at_most])
    more = len(names) - at_most
    return f"{told} and {more} more" if more > 0 else told


def shown(text: object, max_chars: int = _NAME_CHARS_AT_MOST) -> str:
    """Write out what a terminal would hide or obey in a name that comes from a file or a folder.

    Args:
        text: the name.
        max_chars: of the name; what is longer ends in "…".
    """
    name = str(text)
    if name.isprintable() and len(name) <= max_chars:
        return name
    if len(name) > max_chars:
        name = name[: max_chars - 1] + "…"
    return "".join(map(_shown, name))


def shown_lines(text: str) -> str:
    """Do the same to a whole text and leave its lines as they are."""
    return "\n".join(shown(line, len(line)) for line in text.split("\n"))


def can_show(text: str, encoding: str) -> bool:
    """Tell whether a terminal has all characters of a text."""
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")

"""How is text from files shown? All of it passes through :func:`plain`."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime

from unisono.runtime.notices import shown_lines

MAX_TEXT = 2000
MAX_NAME = 60
_SCRIPTS = (".py", ".ipynb")


def program_of(command: Sequence[str]) -> list[str]:
    """Return the words of a command from the program on, without those that start it."""
    scripts = (at for at, word in enumerate(command) if word.endswith(_SCRIPTS))
    program, *arguments = command[next(scripts, 0) :] or [""]
    return [os.path.basename(program) or program, *arguments]


def plain(text: object, max_chars: int = MAX_TEXT) -> str:
    """Return text in which nothing is hidden: control and direction characters are escaped."""
    shown = str(text)
    return shown_lines(shown if len(shown) <= max_chars else shown[: max_chars - 1] + "…")


def name(text: object) -> str:
    """Return a short name on one line."""
    return plain(text, MAX_NAME).replace("\n", " ")


def in_plot(text: object) -> str:
    """Return a name as plotly markup."""
    return html.escape(name(text), quote=False)


def value(found: object) -> str:
    """Return a JSON value as a short text."""
    if isinstance(found, str):
        return found
    if found is None or isinstance(found, bool):
        return {None: "none", True: "yes", False: "no"}[found]
    return json.dumps(found, ensure_ascii=False, allow_nan=True)[:MAX_TEXT]


def moment(unix_s: float | None) -> str:
    """Return a time as text, in UTC."""
    try:
        at = datetime.fromtimestamp(math.nan if unix_s is None else unix_s, UTC)
    except (ValueError, OverflowError, OSError):
        return "–"
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")

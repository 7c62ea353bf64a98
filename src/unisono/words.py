"""Words for the user that are neither results nor errors: one line each, on standard error."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Tell the user something at once, on a line of its own even where a progress bar is drawn.

    Where nobody takes it (a full disk, a pipe without a reader) there is nobody to tell.
    """
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: it has been closed
        start = "\r\x1b[2K" if sys.stderr.isatty() else ""
        print(f"{start}unisono: {line}", file=sys.stderr, flush=True)

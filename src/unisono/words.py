"""Words for the user that are neither results nor errors: one line each, on standard error."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Tell the user something at once, on a line of its own even where a progress bar is drawn.

    Where nobody takes it (a full disk, a pipe without a reader) there is nobody to tell.
    """
    stream = sys.stderr  # or what the program has put in its place, which may do anything
    with contextlib.suppress(Exception):
        start = "\r\x1b[2K" if hasattr(stream, "isatty") and stream.isatty() else ""
        stream.write(f"{start}unisono: {line}\n")
        stream.flush()

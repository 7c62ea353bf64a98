"""The file that a callback writes: where it is, whether it may be written, what to say of it."""

from __future__ import annotations

import itertools
from pathlib import Path

from unisono.callbacks.callback import Callback, Fit
from unisono.notices import say


def path_of(callback: Callback, fit: Fit, what: str, example: str) -> Path:
    """Return where a callback writes, whatever the working directory becomes during ``fit``.

    Args:
        what, example: what is written, and how to say where, for the message.

    Raises:
        ValueError: it writes into the run directory, but the run has none.
    """
    path = callback.writes_to(fit.directory)
    if path is None:
        raise ValueError(
            f"`path` must say where {what} if the run has no directory, but is None: pass "
            f"`{example}`, or `directory=` to the trainer."
        )
    return path.absolute()


def trouble_at(fit: Fit, path: Path) -> str:
    """Say why nothing may be written at a path; empty if it may, or is not in the run directory.

    The run directory may have become another job's. If it was only removed, it is locked again.
    """
    if fit.directory is None or not path.is_relative_to(fit.directory):
        return ""
    return fit.check_directory()


def say_alone(fit: Fit, line: str) -> None:
    """Show a line that only this worker knows.

    ``fit.say`` shows what the first worker says. After rank 0 was lost and replaced the leader is
    another one; its line goes to the standard error then, beside the progress bar.
    """
    if fit.is_first:
        fit.say(line)
    else:
        say(line)


def set_aside(path: Path) -> None:
    """Rename a file, if there is one, since another run begins; a folder keeps its name.

    Raises:
        OSError: it cannot be looked at or renamed.
    """
    names = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(1))
    if path.is_file():
        path.rename(next(name for name in names if not name.exists()))

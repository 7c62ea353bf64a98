"""What `unisono report` and `unisono compare` do: read, draw, write.

A file is whole, or not there: its bytes go to a file beside, which then takes the name. A file of
that name is replaced only if it was written here before: `-o train.py` by mistake keeps the script.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from unisono.plainfile import written_whole
from unisono.report.comparison import MAX_RUNS, comparison
from unisono.report.document import MARK
from unisono.report.history import gather
from unisono.report.page import report

REPORT_NAME = "report.html"


def write_report(
    directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a run.

    Args:
        directory: the run's folder.
        output: the page; `report.html` in the folder if None.

    Returns:
        Where it is.

    Raises:
        ValueError: the folder is no run's, the page cannot be written, or plotly is missing.
        DataFormatError: the run was written by a newer version.
    """
    target = Path(directory) / REPORT_NAME if output is None else Path(output)
    if output is None and target.is_symlink():
        raise ValueError(
            f"{str(target)!r} must be a file that this command wrote, but is a link: remove it, or "
            "name the page with `-o`."
        )
    return write_page(target, report(gather(directory)))


def write_comparison(
    directories: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> Path:
    """Write a page that draws several runs together.

    Returns:
        Where it is.

    Raises:
        ValueError: there are too few or too many runs, a folder is no run's, the page cannot be
            written, or plotly is missing.
        DataFormatError: a run was written by a newer version.
    """
    if not 2 <= len(directories) <= MAX_RUNS:
        raise ValueError(
            f"DIRECTORY must name 2 to {MAX_RUNS} runs, but names {len(directories)}: "
            "use for example `unisono compare runs/one runs/two`."
        )
    names = _names([Path(directory) for directory in directories])
    runs = [gather(one, name) for one, name in zip(directories, names, strict=True)]
    return write_page(output, comparison(runs))


def _names(folders: Sequence[Path]) -> list[str]:
    """Name each folder by its last part, or as it was given where these do not tell all apart."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(map(str, folders))


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page, whole or not at all.

    Returns:
        Where it is.

    Raises:
        ValueError: the name is taken by something else, or the file cannot be written.
    """
    target = Path(path).resolve()
    try:
        _check_name(target)
        with written_whole(target) as file:
            file.write(page.encode(errors="replace"))
    except OSError as error:
        raise ValueError(
            f"`-o` must name a file that can be written, but {str(path)!r} cannot "
            f"({error.strerror}): make room, choose another folder, or change its permissions."
        ) from None
    return target


def _check_name(target: Path) -> None:
    try:
        status = target.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(
            f"`-o` must name a file, but {str(target)!r} is a folder: name a file in it."
        )
    is_ours = False
    if stat.S_ISREG(status.st_mode):
        with target.open("rb") as file:
            is_ours = file.read(len(MARK)) in (b"", MARK.encode())
    if not is_ours:
        raise ValueError(
            "`-o` must name a new file, or one that this command wrote, but "
            f"{str(target)!r} is something else: choose another name, or remove it."
        )

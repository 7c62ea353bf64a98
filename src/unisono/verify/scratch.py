"""Where may a program write while it is verified? Into a copy of the working folder, thrown away.

Two runs of one program must not find each other's checkpoints, and neither may replace the user's.
Small files are copied; large ones, and what is never written to (`.git`, environments), are links
to the originals. A large file is copied when the program opens it for writing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

COPIED_AT_MOST_BYTES = 16 << 20
ENTRIES_AT_MOST = 20_000
_LINKED = frozenset({".git", ".hg", ".venv", "venv", "env", "node_modules", "__pycache__"})


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder: small files whole, everything else as links."""
    target.mkdir()
    num_left = ENTRIES_AT_MOST
    folders = [(source, target)]
    while folders:
        here, there = folders.pop()
        with contextlib.suppress(PermissionError), os.scandir(here) as entries:
            for entry in entries:
                num_left -= 1
                place = there / entry.name
                if place.resolve() == target or Path(entry.path) == target.parent:
                    continue
                if num_left > 0 and _is_walked(entry):
                    place.mkdir()
                    folders.append((Path(entry.path), place))
                else:
                    _copy_or_link(entry, place, may_copy=num_left > 0)


def _is_walked(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir(follow_symlinks=False) or entry.name in _LINKED:
        return False
    return not os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))


def _copy_or_link(entry: os.DirEntry[str], place: Path, *, may_copy: bool) -> None:
    with contextlib.suppress(OSError):
        facts = entry.stat()
        if may_copy and stat.S_ISREG(facts.st_mode) and facts.st_size <= COPIED_AT_MOST_BYTES:
            shutil.copy2(entry.path, place)
            return
    with contextlib.suppress(OSError):
        place.symlink_to(os.path.realpath(entry.path))


def copy_before_writing(folder: str) -> None:
    """Have this process replace a link in `folder` by a copy before it writes to the file behind.

    Python says so for each file that it opens; of what torch and safetensors write natively,
    :func:`unlink_target` is told by their hooks.
    """

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes):
            flags = args[2] if isinstance(args[2], int) else 0
            if flags & (os.O_WRONLY | os.O_RDWR):
                unlink_target(folder, os.fsdecode(args[0]), keep=not flags & os.O_TRUNC)

    sys.addaudithook(audit)


def unlink_target(folder: str, path: str, *, keep: bool) -> None:
    """Replace a link to a file by a file of its own.

    Args:
        folder: where links are replaced; those elsewhere are the program's affair.
        path: what is about to be written.
        keep: with what the file holds, for who adds to it.
    """
    place = os.path.abspath(path)
    if not place.startswith(folder + os.sep) or not os.path.islink(place):
        return
    original = os.path.realpath(place)
    if os.path.isdir(original):
        return
    os.unlink(place)
    if keep:
        shutil.copy2(original, place)

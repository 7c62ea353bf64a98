"""How is a file written so that it is whole, and nothing else is lost?

The bytes go to a file beside, which then takes the name. A file of that name is replaced only if it
is one that was written here before: whoever mistypes `-o train.py` keeps the script.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_whole(
    path: str | os.PathLike[str], parts: Iterable[str], *, mark: str, option: str
) -> Path:
    """Write a text file, whole or not at all.

    Args:
        path: its name.
        parts: what it holds, in UTF-8.
        mark: what each file of this sort begins with.
        option: what the caller calls the name, for messages.

    Returns:
        Where it is.

    Raises:
        ValueError: the name is taken by something else, or the file cannot be written.
    """
    target = Path(path).resolve()
    try:
        _check_name(target, mark, option)
        beside, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
    except OSError as error:
        raise ValueError(
            f"`{option}` must name a file that can be written, but {str(path)!r} cannot "
            f"({error.strerror}): choose another folder, or change its permissions."
        ) from None
    try:
        with open(beside, "w", encoding="utf-8", newline="\n", errors="replace") as file:
            file.writelines(parts)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except OSError as error:
        raise ValueError(
            f"`{option}` must name a file that can be written, but {str(path)!r} cannot "
            f"({error.strerror}): make room, or choose another folder."
        ) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return target


def _check_name(target: Path, mark: str, option: str) -> None:
    try:
        status = target.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(
            f"`{option}` must name a file, but {str(target)!r} is a folder: name a file in it."
        )
    is_ours = False
    if stat.S_ISREG(status.st_mode):
        with target.open("rb") as file:
            begin = file.read(len(mark.encode()))
        is_ours = begin in (b"", mark.encode())
    if not is_ours:
        raise ValueError(
            f"`{option}` must name a new file, or one that this command wrote, but "
            f"{str(target)!r} is something else: choose another name, or remove it."
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

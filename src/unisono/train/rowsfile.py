"""The file that predictions lie in.

With a path, rows are collected beside it in a file whose name no other prediction has, which gets
its own name when every row is on the disk::

    rows.safetensors.3f9c02d1a7b4e856.partial ──► rows.safetensors

So two jobs that predict to one path do not touch each other's rows; the later one's file stays. The
launcher removes a partial file when its job ends early; one is left only by a job that is killed as
a whole, or that has no launcher of ours. Without a path the file has no name: it is a memfd of the
leader, which the others open through its process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from unisono.plainfile import check_plain, is_at, open_plain


def check_path(path: Path) -> None:
    """Find out, before anything is computed, whether a file can get this name.

    Raises:
        OSError: the folder does not exist or cannot be written, or something else has the name.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: make it first")
    if path.is_dir():
        example = path / "predictions.safetensors"
        raise IsADirectoryError(f"that is a folder: name a file in it, such as {example}")
    if path.exists() and not path.is_file():
        raise FileExistsError("that is no file, but a device, pipe or socket: name another file")
    check_plain(path, is_replaced=True)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"the folder {path.parent} cannot be written: name another one")


def partial_path(path: Path) -> Path:
    """Choose a name for the file that is not whole yet: another one each time."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def make_file(partial: Path | None, content: bytes, num_bytes: int) -> int:
    """Make the file in which predictions are collected; return its descriptor.

    Args:
        partial: its name; None: it has none and lies in memory.
        content: what it begins with.
        num_bytes: its size.

    Raises:
        OSError: the folder cannot be written, or has not that much room.
    """
    if partial is None:
        fd = os.memfd_create("unisono-predictions", os.MFD_CLOEXEC)
    else:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()  # of a leader that was lost
        fd = open_plain(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.ftruncate(fd, num_bytes)
        if partial is not None:
            # Now, where an error can be told: a mapped file on a full disk ends the process.
            os.posix_fallocate(fd, 0, num_bytes)
    except BaseException:
        os.close(fd)
        if partial is not None:
            partial.unlink()
        raise
    return fd


def open_file(partial: Path | None, pid: int, fd: int) -> int:
    """Open the file that the leader has made in process `pid` as `fd`; return a descriptor."""
    if partial is not None:
        return open_plain(partial, os.O_RDWR)
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def finish_file(fd: int, partial: Path, path: Path) -> None:
    """Give the file its name, once every row is on the disk; nothing if that has been done.

    Raises:
        OSError: the rows cannot be written, and are gone; or the file cannot be renamed, and they
            lie under its old name.
    """
    try:
        os.fsync(fd)
    except OSError:
        remove(partial)
        raise
    if not is_at(partial, fd):
        if is_at(path, fd):
            return  # by a leader that was lost right afterwards
        raise FileNotFoundError(
            f"the file {partial} with the rows was removed or replaced meanwhile: leave such files "
            f"alone while a prediction goes on, and predict again"
        )
    try:
        os.replace(partial, path)
    except OSError as error:
        raise OSError(
            f"the file cannot get that name ({error.strerror}); every row is in {partial}: rename "
            f"that file yourself"
        ) from error


def remove(partial: Path) -> None:
    """Remove a file that will not become whole, if it is there."""
    with contextlib.suppress(OSError):
        partial.unlink()


def identity_of(fd: int) -> list[int]:
    """Tell a file from every other one, and from itself with other contents, as plain JSON."""
    seen = os.fstat(fd)
    return [seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns]

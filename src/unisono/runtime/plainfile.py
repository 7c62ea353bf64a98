"""Open a file of a directory, and nothing that was put in its place.

::

    runs/mnist ─────────────► events.jsonl      a plain file under one name, or none yet
    may be a link, and its    no link, pipe, device, socket or directory;
    parents may be links      a file to write has no other name (hard link)

The user chooses the directory; its files belong to Unisono. A link would lead out of the directory,
a pipe would block the process that opens it, and opening a device may do anything. Files are
therefore opened relative to the directory's descriptor, without following links, and then checked.
"""

from __future__ import annotations

import glob
import os
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from unisono.errors import NotPlainFileError
from unisono.runtime.notices import shown
from unisono.runtime.procfs import host_name, started_at

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file as ``os.open`` does, or raise; its folder may be behind links."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_in(folder, path, flags)
    finally:
        os.close(folder)


def open_in(folder: int, path: Path, flags: int) -> int:
    """Open a plain file in an open directory; only the last part of `path` is used."""
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    with suppress(FileNotFoundError):  # before it is opened, as it may be a device
        _check(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False), writes)
    safe = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path.name, safe, 0o666, dir_fd=folder)
    try:
        _check(path, os.fstat(fd), writes)
    except NotPlainFileError:
        os.close(fd)
        raise
    return fd


def check_path(argument: str, given: object) -> None:
    """Raise a TypeError if a value cannot be the name of a file or folder."""
    if not isinstance(given, str | os.PathLike):
        seen = repr(given) if isinstance(given, bool | int | bytes | None) else ""
        raise TypeError(
            f"`{argument}` must be the name of a file or folder, but is "
            f'{seen or f"of type {type(given).__name__}"}: pass a text such as "runs/mnist".'
        )


def path_given(path: str | os.PathLike[str], argument: str = "path") -> Path:
    """Return a path passed by the user, with ``~`` expanded to a home folder, as in shells."""
    check_path(argument, path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"`~` must stand for a home folder that is known here, but for {shown(path, 1000)} "
            f"none is: set HOME, or write the folder out."
        ) from None


# How names end in which other programs expect what no weights are written as here.
_OF_OTHERS = (".onnx", ".h5", ".hdf5", ".keras", ".npz", ".npy", ".gguf", ".pb", ".tflite", ".pt2")


def weights_file(path: str | os.PathLike[str]) -> Path:
    """Return where weights go; raises ValueError where the name is one of another format."""
    found = path_given(path)
    if found.suffix.lower() in _OF_OTHERS:
        raise ValueError(
            f"`path` must end in .safetensors, or in .pt for torch.load, but is {str(path)!r}: "
            f"pass {str(found.with_suffix('.safetensors'))!r}; for {found.suffix}, export the "
            f"model once it is trained."
        )
    return found


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name, and rename it once it is complete and on the disk.

    A reader finds the old file or a complete new one, even after a crash or if several processes
    write it at once. If the block raises, the old file stays and the new one is removed. Leftovers
    of a killed process are removed by the next process on its host.
    """
    start = f".{path.name}.{zlib.crc32(host_name().encode()):08x}-"
    for left in path.parent.glob(f"{glob.escape(start)}*.part"):
        with suppress(ValueError):  # it is not one of ours
            thread, _, started = left.name.removeprefix(start).removesuffix(".part").partition("-")
            if str(started_at(int(thread))) != started:
                left.unlink(missing_ok=True)
    thread_id = threading.get_native_id()
    beside = path.with_name(f"{start}{thread_id}-{started_at(thread_id)}.part")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_plain(path: Path, *, is_replaced: bool = False) -> None:
    """Raise if a path is not a plain file, without opening it; `is_replaced` allows other names."""
    try:
        seen = os.lstat(path)
    except (OSError, ValueError):
        return  # opening it will report it
    _check(path, seen, writes=not is_replaced)


def check_own_folder(path: Path) -> None:
    """Raise if a link replaces a folder in which a run creates files."""
    if os.path.islink(path):
        raise NotPlainFileError(
            f"{shown(path, 1000)} must be a directory, but is a symbolic link: move it away, or "
            f"pass a `path` of another name."
        )


def is_at(path: Path, fd: int) -> bool:
    """Return whether an open plain file still has this name; links to it do not count."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(there.st_mode) and os.path.samestat(there, os.fstat(fd))


def _check(path: Path, seen: os.stat_result, writes: bool) -> None:
    kind = "one with several names (hard links)" if writes and seen.st_nlink > 1 else ""
    if not stat.S_ISREG(seen.st_mode):
        kind = _KINDS[stat.S_IFMT(seen.st_mode)]
    if kind:
        raise NotPlainFileError(
            f"{shown(path, 1000)} must be a plain file with no other name, but is {kind}: move it "
            f"away, or put a copy of the file in its place."
        )

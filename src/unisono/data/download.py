"""Download the files of a data set into a folder, once per host, with pooch.

Pooch gives a file its name once its checksum is right; what comes is never unpickled. The kernel's
lock on a file in the folder has one process download while others wait, and ends with that process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import DownloadError
from unisono.plainfile import open_plain

_TIMEOUT_S = 30.0  # for a server's next bytes


def fetch_missing(folder: Path, files: Mapping[str, str], address: str) -> None:
    """Download the files that are not in a folder, packed or not; make the folder if need be.

    Args:
        folder: where to.
        files: the checksum of each, such as ``sha256:…``, by file name.
        address: of the folder that has them.

    Raises:
        ModuleNotFoundError: something is missing, and so is pooch.
        DownloadError: a file does not come with its checksum, or the folder cannot be written, or
            has a file with another.
    """
    if all(_is_there(folder, name, checksum) for name, checksum in files.items()):
        return
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`download=True` needs the package {error.name}, which is not installed: run "
            f"`pip install 'unisono[download]'`, or put {', '.join(files)} into {folder} yourself.",
            name=error.name,
        ) from error
    # A server may pack what it sends once more, and requests unpack it.
    headers = {"Accept-Encoding": "identity"}
    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_S, headers=headers)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_fd = open_plain(folder / ".download.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
            for name, checksum in files.items():
                if not _is_there(folder, name, checksum):
                    pooch.retrieve(address + name, checksum, name, folder, downloader=downloader)
                    # Temporary files are their owner's alone.
                    (folder / name).chmod(os.fstat(lock_fd).st_mode & 0o666)
        finally:
            os.close(lock_fd)
    except DownloadError:
        raise
    except (OSError, ValueError) as error:  # those of requests are OSErrors
        raise DownloadError(
            f"{', '.join(files)} must come from {address} into {folder}, but “{error}”: check the "
            f"network and the folder, or put the files there yourself."
        ) from error


def _is_there(folder: Path, name: str, checksum: str) -> bool:
    """Look for a file, unpacked or else packed; what is packed must be what it is taken for."""
    if (folder / name.removesuffix(".gz")).is_file():
        return True
    path = folder / name
    if not path.is_file():
        return False
    kind, _, digits = checksum.partition(":")
    found = hashlib.new(kind, path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != digits:
        raise DownloadError(
            f"{path} must have the checksum {checksum}, but has {found}, so it is damaged or of "
            f"another data set: delete it, or pass another folder."
        )
    return True

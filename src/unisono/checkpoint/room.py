"""What is missing where a checkpoint finds no room? Bytes, files, or a share of them, in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from unisono.checkpoint.folder import COMMIT, FILES

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NUM_FILES = len((*FILES, COMMIT)) + 2  # and two folders


def told_room(directory: Path, num_bytes: int, code: int) -> str:
    """Say what is missing.

    Args:
        directory: the run directory.
        num_bytes: of the checkpoint's files.
        code: one of :data:`NO_ROOM`.
    """
    if code == errno.EDQUOT:
        return (
            f"your quota there must leave about {num_bytes:,} bytes and {_NUM_FILES} files, but "
            f"does not"
        )
    there = os.statvfs(_existing(directory))
    free = there.f_bavail * there.f_frsize
    if there.f_files and there.f_favail < _NUM_FILES:
        return (
            f"the disk must have room for {_NUM_FILES} more files, but all its "
            f"{there.f_files:,} inodes are in use"
        )
    if free < num_bytes:
        return told_missing(num_bytes, free)
    return (
        f"the disk must have about {num_bytes:,} bytes free, but was full while they were written "
        f"(now {free:,} are)"
    )


def told_missing(num_bytes: int, free: int) -> str:
    """Say how many bytes are missing."""
    return (
        f"the disk must have about {num_bytes:,} bytes free, but has {free:,} "
        f"({num_bytes - free:,} too few)"
    )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path

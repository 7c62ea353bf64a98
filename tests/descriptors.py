"""Whether something leaves descriptors open: what is open now and was not before.

Counting them will not do, as other things of this process close theirs meanwhile.
"""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def open_files() -> dict[int, str]:
    """Find what each descriptor of this process leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that has read the folder
            continue
        found[int(name)] = f"{link} {status.st_dev}:{status.st_ino}"
    return found


@contextmanager
def none_stay_open() -> Iterator[None]:
    """See that whatever the block opens is closed at its end."""
    gc.disable()  # else what earlier tests have left may be closed, and its number given out again
    try:
        before = open_files()
        yield
        stay = open_files().items() - before.items()
        if stay:
            gc.collect()
            stay &= open_files().items()
    finally:
        gc.enable()
    assert not stay, f"these stay open: {stay}"


def is_locked(directory: str | os.PathLike[str]) -> bool:
    """Tell whether somebody holds the kernel's lock of a directory."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

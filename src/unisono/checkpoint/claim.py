"""Who may write into a run directory? One job at a time: whoever holds the lock on the folder.

The kernel lets go of the lock when the process that holds it ends, however that comes about, and
nothing is left in the folder. Where a file system knows no locks, nobody is kept out.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from unisono.errors import CheckpointError
from unisono.words import shown

_claims: weakref.WeakValueDictionary[tuple[int, int], Claim] = weakref.WeakValueDictionary()


class Claim:
    """Holds a folder as long as it lives; only :func:`claim` makes one. Final."""

    def __init__(self, fd: int) -> None:
        self.let_go = weakref.finalize(self, os.close, fd)


def claim(directory: Path) -> Claim | None:
    """Keep other processes out of a folder; within a process all claims to it are one.

    Returns:
        What holds it; None where that is not possible.

    Raises:
        CheckpointError: another process has it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None  # whoever writes there will say so
    status = os.fstat(fd)
    place = status.st_dev, status.st_ino
    held = _claims.get(place)
    if held is not None:
        os.close(fd)
        return held
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise CheckpointError(
            f"a run directory must belong to one job at a time, but {shown(directory, 1000)} is "
            f"in use by "
            f"{_holder(status.st_ino)}: wait until that has ended, or pass another `directory`."
        ) from None
    except OSError:
        os.close(fd)
        return None
    made = _claims[place] = Claim(fd)
    return made


def _holder(inode: int) -> str:
    """Name the process that has locked an inode, as far as the kernel tells. Source: proc(5)."""
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, place, _, _ = line.split()
            if kind == "FLOCK" and place.endswith(f":{inode}") and int(pid) > 0:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                return f"process {pid} (`{shown(b' '.join(words).decode(errors='replace'))}`)"
    except (OSError, ValueError):
        pass
    return "another process"


def _let_go_of_all() -> None:
    """Have the lock end with the process that took it, not with one that it forked."""
    for held in list(_claims.values()):
        held.let_go()
    _claims.clear()


os.register_at_fork(after_in_child=_let_go_of_all)

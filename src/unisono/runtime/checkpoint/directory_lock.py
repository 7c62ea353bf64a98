"""Locks a run directory, so that one job at a time writes into it.

The kernel releases the lock when the process that holds it ends, however it ends, and nothing is
left in the folder. On a file system without locks, nobody is kept out.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from unisono.errors import CheckpointError
from unisono.runtime.notices import shown

FileId = tuple[int, int]

_locks: weakref.WeakValueDictionary[FileId, DirectoryLock] = weakref.WeakValueDictionary()
_making = threading.Lock()


class DirectoryLock:
    """Holds a folder as long as it lives; only :func:`lock_directory` makes one. Final."""

    def __init__(self, fd: int, file_id: FileId) -> None:
        self.file_id = file_id
        self.let_go = weakref.finalize(self, os.close, fd)


class DirectoryLocks:
    """The locks that a job holds on run directories, taken anew when those are replaced. Final.

    A directory that is removed or moved takes its lock with it, so another job could hold what is
    made under its name.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()  # a checkpoint may be written while a worker asks
        self._held: dict[str, DirectoryLock] = {}

    def hold(self, directory: Path) -> None:
        """Lock the folder that has this name now."""
        with self._lock:
            held = self._held.get(str(directory))
            if held is not None and held.file_id == file_id_of(directory):
                return
            made = lock_directory(directory)
            if made is None:
                return
            self._held[str(directory)] = made
            if held is not None:
                self._say(
                    f"the run directory {shown(directory, 1000)} was removed or replaced while the "
                    f"run was under way: the run goes on in what has that name now, and what it "
                    f"had kept before is not there."
                )

    def let_go(self) -> None:
        """Release all of them."""
        self._held.clear()


def file_id_of(directory: Path) -> FileId | None:
    """Tell a directory from every other one, whatever its name; None where there is none."""
    try:
        seen = os.stat(directory)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def lock_directory(directory: Path) -> DirectoryLock | None:
    """Lock a folder against other processes; None where locking is not possible.

    Within a process all locks on it are one. Raises a CheckpointError if another process has it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None  # whoever writes there will say so
    status = os.fstat(fd)
    file_id = status.st_dev, status.st_ino
    with _making:  # else a second thread is kept out by the first
        held = _locks.get(file_id)
        if held is not None:
            os.close(fd)
            return held
        return _locked(fd, file_id, directory)


def _locked(fd: int, file_id: FileId, directory: Path) -> DirectoryLock | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise CheckpointError(
            f"a run directory must belong to one job at a time, but {shown(directory, 1000)} is "
            f"in use by "
            f"{_holder(file_id[1])}: wait until that has ended, or pass another `directory`."
        ) from None
    except OSError:
        os.close(fd)
        return None
    made = _locks[file_id] = DirectoryLock(fd, file_id)
    return made


def holder_of(directory: Path) -> int | None:
    """Tell which process has locked a directory; None if none has, or nobody can tell."""
    file_id = file_id_of(directory)
    return None if file_id is None else _holder_pid(file_id[1])


def _holder(inode: int) -> str:
    """Name the process that has locked an inode, as far as the kernel tells."""
    pid = _holder_pid(inode)
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "another process"
    return f"process {pid} (`{shown(b' '.join(words).decode(errors='replace'))}`)"


def _holder_pid(inode: int) -> int | None:
    """Ask the kernel who has locked an inode. Source: proc(5), ``locks``."""
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, file_id, _, _ = line.split()
            if kind == "FLOCK" and file_id.endswith(f":{inode}") and int(pid) > 0:
                return int(pid)
    except (OSError, ValueError):
        pass
    return None


def _let_go_of_all() -> None:
    """Release the locks in a forked process: they belong to the one that took them."""
    global _making
    _making = threading.Lock()  # another thread may have held it
    for held in list(_locks.values()):
        held.let_go()
    _locks.clear()


os.register_at_fork(after_in_child=_let_go_of_all)

"""A run directory's checkpoints: list them, find the newest complete one, keep only the last.

A checkpoint that a loop over steps ended with has a mark in its folder that names the loop. A
restarted program repeats what it does between two loops, starting from the state that it had there.
Of older loops only ``ended-000000000812/`` is left: the variables and objects of the program, by
which it takes the same course again, but no tensors.

Only one job at a time writes to a run directory: the job locks it. The kernel releases the lock
when the process that holds it ends; only an empty file is left over. NFS and Lustre keep the lock
of a directory on its host, and share only that of the file. File systems may lack locks.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, final

from unisono.errors import CheckpointError, NotPlainFileError
from unisono.runtime.checkpoint.folder import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    RUN_FILE,
    Content,
    ForbiddenError,
    TooLargeError,
    check_folder,
    read_folder,
    write_folder,
)
from unisono.runtime.checkpoint.sealed import Sealed
from unisono.runtime.notices import shown
from unisono.runtime.plainfile import open_plain, written_whole
from unisono.runtime.procfs import holder_of, started_at

Contents = TypeVar("Contents")

_CHECKPOINT, _REDUCED = "step-", "ended-"
_DIGITS = re.compile(r"\d{12}")
END_MARK, END_MARK_BYTES_AT_MOST = "end-of-loop", 1 << 16
_LOCK_FILE = ".lock"
_FORKS_LET_GO_WITHIN_S = 2.0
_ENDS_AT_LEAST, _ENDS_AT_MOST = 8, 256  # ends of loops that are kept besides the newest checkpoints
_ENDS_BYTES = 128 << 20  # of all of them, if there are more than the minimum
_REDUCED_AT_MOST, _REDUCED_BYTES = 4096, 64 << 20  # the same without tensors
# How a loop can end: completed, left early, left early before another one began, without a step.
ENDED, LEFT, PASSED, IDLE = "ended ", "left ", "passed ", "idle "


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint in a run directory."""

    path: Path  # its folder
    step: int  # completed steps, from the folder's name
    num_bytes: int  # the total size of its files; 0 if it is incomplete
    trouble: str  # why it cannot be used; empty if it is complete


@final
class RunDirectory:
    """The checkpoints below ``directory/checkpoints``.

    All checkpoints found belong to the current run's past: others are set aside when a run begins.
    """

    def __init__(self, directory: Path, keep: int = 3) -> None:
        self.folder = Path(directory) / "checkpoints"
        self._keep = keep

    def entries(self) -> list[CheckpointEntry]:
        """Return all checkpoints, newest first, after verifying every byte."""
        entries = []
        for step, path in reversed(self._found()):
            try:
                entries.append(CheckpointEntry(path, step, sum(check_folder(path).values()), ""))
            except CheckpointError as error:
                if path.exists():  # a run under way removes old ones
                    entries.append(CheckpointEntry(path, step, 0, str(error)))
        return entries

    def has(self, step: int) -> bool:
        """Return whether step `step` has a checkpoint: the name implies that it is complete."""
        return _is_checkpoint(self.path_of(step))

    def write(self, step: int, files: Mapping[str, Content]) -> Path:
        """Write a checkpoint of step `step`, then remove those beyond `keep` that end no loop.

        Older checkpoints stay if it cannot be written, with an OSError.
        """
        self._check_no_link()
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob(".step-*.part"):  # of a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        path = self.path_of(step)
        write_folder(path, files)
        ends = self.ends()
        for old in outdated(ends, self._keep, ends_at_most(path)):
            (self._reduce if ends[old] else self._remove)(old)
        return path

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, which is whole until it is gone."""
        unfinished = self.folder / f".{name_of(step)}.part"
        with suppress(OSError):
            self.path_of(step).rename(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)

    def _reduce(self, step: int) -> None:
        """Leave only what the program had when a loop ended, and forget the oldest of these."""
        unfinished, left = self.folder / f".{name_of(step)}.part", self._left_of(step)
        with suppress(OSError):
            self.path_of(step).rename(unfinished)
            for name in (MODEL_FILE, OPTIMIZER_FILE):
                (unfinished / name).unlink()
            unfinished.rename(left)
            num_kept = min(_REDUCED_AT_MOST, _REDUCED_BYTES // (left / RUN_FILE).stat().st_size)
            for _, path in self._found(_REDUCED)[:-num_kept] if num_kept else ():
                shutil.rmtree(path, ignore_errors=True)

    def ends(self) -> dict[int, str]:
        """Return, by step, which loops ended with each checkpoint, a line for each."""
        return {step: "\n".join(_marks_in(path)) for step, path in self._found()}

    def mark_end(self, step: int, end: str) -> None:
        """Mark a checkpoint as a loop's end; `end`: :data:`ENDED`, for example, and the loop."""
        self._set_marks(step, dict.fromkeys([*self.marks(step), *end.splitlines()]))

    def end_of(self, loop: str, step: int) -> Path | None:
        """Return the checkpoint that a loop ended with, if the run has reached a later step `step`.

        A loop that was left early continues if nothing was done after it.
        """
        if LEFT + loop in (marks := self.marks(step)):
            self._set_marks(step, [mark for mark in marks if mark != LEFT + loop])
        ends = {how + loop for how in (ENDED, LEFT, PASSED, IDLE)}
        found = [path for at, path in self._found() if at < step and ends & {*_marks_in(path)}]
        return found[-1] if found else None

    def reduced_end_of(self, loop: str) -> Path | None:
        """Return what is left of the checkpoint that a loop ended with, without its tensors."""
        ends = {how + loop for how in (ENDED, PASSED, IDLE)}
        found = [path for _, path in self._found(_REDUCED) if ends & {*_marks_in(path)}]
        return found[-1] if found else None

    def mark_passed(self, step: int) -> None:
        """Record that the program has begun another loop after it left one early."""
        marks = self.marks(step)
        if any(mark.startswith(LEFT) for mark in marks):
            self._set_marks(step, [re.sub(f"^{LEFT}", PASSED, mark) for mark in marks])

    def marks(self, step: int) -> list[str]:
        """Return the marks of a checkpoint: which loops ended with it, and how."""
        return _marks_in(self.path_of(step))

    def _set_marks(self, step: int, marks: Iterable[str]) -> None:
        with written_whole(self.path_of(step) / END_MARK) as file:
            file.write("\n".join(marks).encode())

    def set_aside(self, step: int) -> list[str]:
        """Rename checkpoints of later steps than `step`: they do not belong to this run's past."""
        found = [*self._found(), *self._found(_REDUCED)]
        later = [path for number, path in found if number > step]
        for path in later:
            rename_aside(path)
        return [path.name for path in later if path.name.startswith(_CHECKPOINT)]

    def newest(
        self,
        read: Callable[[Mapping[str, Sealed]], Contents],
        at_most: Mapping[str, int] = MappingProxyType({}),
    ) -> tuple[Contents | None, CheckpointEntry | None, list[CheckpointEntry]]:
        """Return the contents of the newest complete checkpoint, its entry, and those skipped.

        `read` makes the contents from the three files; its CheckpointError skips the checkpoint. A
        file that is larger than it can be belongs to another model, as older checkpoints would, so
        its error is raised, and so is the error of a checkpoint that this user may not read.
        """
        passed_over: list[CheckpointEntry] = []
        for step, path in reversed(self._found()):
            try:
                files = read_folder(path, at_most)
                entry = CheckpointEntry(path, step, sum(map(len, files.values())), "")
                return read(files), entry, passed_over
            except TooLargeError as error:
                raise TooLargeError(f"{path.name}: {error}") from None
            except ForbiddenError:
                raise
            except CheckpointError as error:
                passed_over.append(CheckpointEntry(path, step, 0, str(error)))
        return None, None, passed_over

    def path_of(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / name_of(step)

    def _left_of(self, step: int) -> Path:
        return self.folder / f"{_REDUCED}{step:012}"

    def _check_no_link(self) -> None:
        """Raise if the folder of checkpoints is a link: it may be another run's."""
        if self.folder.is_symlink():
            raise CheckpointError(
                f"{self.folder} must be a folder, but is a link, and what it leads to may be "
                f"another run's: pass the folder itself as `directory`, or let that be the link."
            )

    def _found(self, prefix: str = _CHECKPOINT) -> list[tuple[int, Path]]:
        """Return the folders that are named like checkpoints, oldest first, without links."""
        self._check_no_link()
        try:
            children = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        named = [(_number_in(child.name, prefix), child) for child in children]
        return sorted(
            (step, child) for step, child in named if step is not None and _is_checkpoint(child)
        )


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"{_CHECKPOINT}{step:012}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for any other name."""
    return _number_in(name, _CHECKPOINT)


def _number_in(name: str, prefix: str) -> int | None:
    digits = name.removeprefix(prefix)
    return int(digits) if digits != name and _DIGITS.fullmatch(digits) else None


def rename_aside(path: Path) -> None:
    """Rename a file or folder to a name that runs ignore."""
    number = 1
    while (aside := path.with_name(f"aside-{number}-{path.name}")).exists():
        number += 1
    path.rename(aside)


def ends_at_most(newest: Path) -> int:
    """Return how many ends of loops to keep: eight, more if the newest checkpoint is small.

    A resumed program of many short loops needs each of them.
    """
    with suppress(OSError):
        num_bytes = sum(file.stat().st_size for file in newest.iterdir())
        return max(_ENDS_AT_LEAST, min(_ENDS_AT_MOST, _ENDS_BYTES // max(1, num_bytes)))
    return _ENDS_AT_LEAST


def outdated(ends: Mapping[int, str], keep: int, num_ends: int) -> list[int]:
    """Return the steps, of :meth:`RunDirectory.ends`, whose checkpoints are no longer needed."""
    steps = sorted(ends)
    of_loops = [step for step in steps if ends[step]][-num_ends:]
    return [step for step in steps[:-keep] if step not in of_loops]


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _marks_in(path: Path) -> list[str]:
    """Return which loops ended with a checkpoint; none if that cannot be read."""
    try:
        with os.fdopen(open_plain(path / END_MARK, os.O_RDONLY), "rb") as file:
            return file.read(END_MARK_BYTES_AT_MOST).decode(errors="replace").splitlines()
    except (OSError, NotPlainFileError):
        return []


@final
class HeldElsewhereError(CheckpointError):
    """Another host has locked a run directory; if it is gone, the file server notices later."""


FileId = tuple[int, int]

_locks: weakref.WeakValueDictionary[FileId, DirectoryLock] = weakref.WeakValueDictionary()
_making = threading.Lock()


@final
class DirectoryLock:
    """Locks a folder while this object lives; only :func:`lock_directory` creates one."""

    def __init__(self, fds: Sequence[int], file_id: FileId) -> None:
        self.file_id = file_id
        self.release = weakref.finalize(self, _close, fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@final
class DirectoryLocks:
    """The locks of a job on run directories, renewed when a directory is replaced.

    A directory that is removed or moved takes its lock with it, which leaves a new one free.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()  # a checkpoint may be written during a worker's request
        self._held: dict[str, DirectoryLock] = {}

    def acquire(self, directory: Path) -> None:
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
                    f"run was under way: the run continues in the directory with that name now, "
                    f"without its earlier checkpoints."
                )

    def release(self) -> None:
        """Release all locks."""
        self._held.clear()


def file_id_of(directory: Path) -> FileId | None:
    """Return what identifies a directory whatever its name; None if it does not exist."""
    try:
        seen = os.stat(directory)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def lock_directory(directory: Path) -> DirectoryLock | None:
    """Lock a folder against other processes; return None if it cannot be locked.

    All locks of one process on a folder are one lock. Raises a CheckpointError if another has it,
    a HeldElsewhereError if that is on another host.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None  # writing there will report it
    status = os.fstat(fd)
    file_id = status.st_dev, status.st_ino
    with _making:  # otherwise a second thread would see the first one's lock as foreign
        held = _locks.get(file_id)
        try:
            if held is None:
                _lock(fd, directory)
                fds = *_locked_file(directory), os.dup(fd)
                held = _locks[file_id] = DirectoryLock(fds, file_id)
        except BlockingIOError:
            pid = holder_of(directory)
            raise CheckpointError(
                f"a run directory must belong to one job at a time, but {shown(directory, 1000)} "
                f"is in use by {'another process' if pid is None else f'process {pid}'}: wait "
                f"until that has ended, or pass another `directory`."
            ) from None
        except OSError:
            return None
        finally:
            os.close(fd)
    return held


def _locked_file(directory: Path) -> list[int]:
    """Lock a file in a folder; return its descriptor, or nothing if that cannot be done."""
    path = directory / _LOCK_FILE
    try:
        fd = open_plain(path, os.O_RDWR | os.O_CREAT)  # NFS locks no file that is only read
    except NotPlainFileError as error:
        raise CheckpointError(str(error)) from None
    except OSError:
        return []
    try:
        _lock(fd, path)
    except BlockingIOError:
        os.close(fd)
        raise HeldElsewhereError(
            f"a run directory must belong to one job at a time, but {shown(directory, 1000)} is in "
            f"use on another host: wait until that has ended, pass another `directory`, or remove "
            f"{_LOCK_FILE} there if that host is gone."
        ) from None
    except OSError:
        os.close(fd)
        return []
    return [fd]


def _lock(fd: int, path: Path) -> None:
    """Lock a folder or file, or raise BlockingIOError; wait a moment for forks of a dead holder.

    A fork releases the lock when it starts to run, which may be after its parent was killed.
    """
    until_s, is_told = time.monotonic() + _FORKS_LET_GO_WITHIN_S, True
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, was_told = holder_of(path), is_told
            is_told = pid is not None  # if not, the lock may just have been released
            is_there = not was_told if pid is None else started_at(pid) is not None
            if is_there or time.monotonic() > until_s:
                raise
            time.sleep(0.01)


def _release_all() -> None:
    """Release the locks in a forked process: they belong to its parent."""
    global _making
    _making = threading.Lock()  # another thread may have held it
    for held in list(_locks.values()):
        held.release()
    _locks.clear()


os.register_at_fork(after_in_child=_release_all)

"""Writes checkpoints while training continues, in a thread of the process that owns the memory.

That process is the launcher, or a worker without one. While a snapshot is written, its slot is
marked as busy in the memory itself, so that no worker overwrites it; one snapshot is written at a
time. A full or broken disk does not end a run: the writer reports it and tries the next checkpoint.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from unisono.runtime.checkpoint.folder import RUN_FILE
from unisono.runtime.checkpoint.remote import finish_copying, start_copying
from unisono.runtime.checkpoint.run_directory import DirectoryLocks, RunDirectory
from unisono.runtime.checkpoint.slots import Data, Places, files_of, read_facts
from unisono.runtime.notices import shown

BUSY, FREE = b"\1", b"\0"
_CHANGED = "a snapshot must stay as it is until it is written, but has changed"


@dataclass(frozen=True, slots=True)
class SlotToWrite:
    """A snapshot: where it is stored and where to write it."""

    places: Places  # in the memory that holds it
    slot: int
    step: int  # completed steps
    directory: str  # the run directory
    keep: int  # how many checkpoints to keep
    end: str = ""  # which loop has ended with it, see `RunDirectory.mark_end`; or empty

    def mark(self, memory: mmap.mmap, busy: bytes) -> None:
        """Mark in the memory whether the slot is being written."""
        at = self.places.busy_at(self.slot)
        memory[at : at + 1] = busy


def newest_to_write(memory: mmap.mmap, loop: Mapping[str, Any]) -> SlotToWrite | None:
    """Return the newest complete snapshot of a loop, from its facts; None before step 1.

    Before the first step there is nothing to keep: a program that fails there is usually changed,
    and a checkpoint would tie it to the model that it had.
    """
    places = Places.from_json(dict(loop))
    slot = places.newest(lambda offset, count: memory[offset : offset + count])
    if slot is None:
        return None
    with memoryview(memory) as whole, whole[places.bounds(slot)] as view:
        facts = read_facts(view, places.blob_at)
    step = facts["position"]["step"]
    return SlotToWrite(places, slot, step, loop["directory"], loop["keep"]) if step else None


@final
class CheckpointWriter:
    """Writes snapshots as checkpoints, one after the other.

    `say` reports problems. `is_full`, for tests, returns whether the disk is full for the n-th
    checkpoint. `locks` are the directories that this job has locked. `newest` describes the last
    checkpoint written and how to continue from it.
    """

    def __init__(
        self, say: Callable[[str], None], is_full: Callable[[int], bool] = lambda number: False
    ) -> None:
        self.locks = DirectoryLocks(say)
        self._say = say
        self._is_full = is_full
        self._thread: threading.Thread | None = None
        self._num_begun = 0
        self._copied: set[str] = set()
        self.newest = ""
        self._missing: dict[str, int] = {}  # by directory, the newest step, if it was not written

    @property
    def not_saved(self) -> str:
        """Describe which newest states are not on the disk; empty if all are."""
        return "; ".join(
            f"the newest state, of step {step}, is NOT on the disk, in {shown(directory, 1000)}: "
            f"see that there is room and that you may write there, then start the program again, "
            f"which resumes from the newest checkpoint"
            for directory, step in self._missing.items()
        )

    def begin(
        self, memory: mmap.mmap, kept: SlotToWrite, done: Callable[[], None] = lambda: None
    ) -> None:
        """Start to write a snapshot, once the previous one is written.

        `memory` is the whole memory that holds `kept`; the thread calls `done`.
        """
        self.wait()
        self._num_begun += 1
        kept.mark(memory, BUSY)
        work = memory, kept, done, self._num_begun
        thread = threading.Thread(target=self._write, args=work, name="unisono-writer")
        try:
            thread.start()
        except RuntimeError:  # there may be no more threads
            self._write(*work)
        else:
            self._thread = thread

    def lock(self, directory: Path, remote: Mapping[str, Any] | None) -> None:
        """Lock a directory, and start to copy it to and from a URL if it has one.

        `remote` is the configuration of ``remote_process.py``. Raises a CheckpointError if the
        directory is in use.
        """
        self.locks.acquire(directory)
        if remote is not None:
            self._copied.add(str(directory))
            start_copying(str(directory), remote)

    def close(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until nothing is being written or copied, then release the directories."""
        self.wait()
        finish_copying(self._copied, is_enough)
        self.locks.release()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self, memory: mmap.mmap, kept: SlotToWrite, done: Callable[[], None], number: int
    ) -> None:
        try:
            with memoryview(memory) as whole, whole[kept.places.bounds(kept.slot)] as slot:
                trouble = self._attempt(memory, slot, kept, number)
            if trouble:
                self._missing[kept.directory] = kept.step
                self._say(
                    f"step {kept.step}: no checkpoint: {trouble}; training continues, and the "
                    f"next one is tried."
                )
            else:
                self._missing.pop(kept.directory, None)
                self.newest = (
                    f"step {kept.step} is on the disk, in {shown(kept.directory, 1000)}: start the "
                    f"program again to continue from there"
                )
        finally:
            kept.mark(memory, FREE)
            done()

    def _attempt(self, memory: mmap.mmap, slot: memoryview, kept: SlotToWrite, number: int) -> str:
        """Write a checkpoint unless the step has one; return what has failed, or nothing."""
        try:
            if self._is_full(number):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.locks.acquire(Path(kept.directory))
            store = RunDirectory(Path(kept.directory), kept.keep)
            if not store.has(kept.step):
                mark = _mark(memory, kept)
                facts = read_facts(slot, kept.places.blob_at)
                if not any(mark) or facts["position"]["step"] != kept.step:
                    raise ValueError(_CHANGED)
                files = files_of(slot, kept.places.blob_at)
                last = _checked_after(files[RUN_FILE], mark, memory, kept)
                store.write(kept.step, {**files, RUN_FILE: last})
            if kept.end:
                self._mark_end(store, kept)
        except Exception as error:  # whatever it is, the state is not on the disk
            return str(error).removesuffix(".") or type(error).__name__
        return ""

    def _mark_end(self, store: RunDirectory, kept: SlotToWrite) -> None:
        """Mark a checkpoint as a loop's end; the state is saved even if that fails."""
        try:
            store.mark_end(kept.step, kept.end)
        except OSError as error:
            if not store.has(kept.step):
                raise
            self._say(
                f"step {kept.step}: the checkpoint is on the disk, but is not marked as the end of "
                f"a loop: {error}; if a later loop resumes, the program sees newer weights before "
                f"it than this loop ended with."
            )


def _mark(memory: mmap.mmap, kept: SlotToWrite) -> bytes:
    at = kept.places.mark_at(kept.slot)
    return memory[at : at + 8]


def _checked_after(
    chunks: Iterable[Data], mark: bytes, memory: mmap.mmap, kept: SlotToWrite
) -> Iterator[Data]:
    """Yield the last file of a checkpoint, then check that the snapshot has not changed."""
    yield from chunks
    if _mark(memory, kept) != mark:
        raise ValueError(_CHANGED)

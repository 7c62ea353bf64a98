"""Who writes a checkpoint while training goes on? A thread of whoever owns the snapshot's memory.

That is the launcher, or a process that nobody launched. While a snapshot is written its slot is
marked as busy in the memory itself, so that no worker writes over it; one is written at a time.
A disk that is full or broken ends no run: it is told, and the next checkpoint is tried.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.directory_lock import DirectoryLocks
from unisono.checkpoint.folder import FILES, RUN_FILE, commit_of
from unisono.checkpoint.places import Places
from unisono.checkpoint.room import NO_ROOM, told_missing, told_room
from unisono.checkpoint.run_directory import RunDirectory
from unisono.checkpoint.safetensors_stream import Data
from unisono.checkpoint.slots import files_of, read_facts
from unisono.errors import CheckpointError

BUSY, FREE = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot, where it lies and where it goes.

    Attributes:
        key: the memory that holds it.
        start: its first byte there.
        stop: the first byte after it.
        blob_at: where in it the description begins.
        mark_at: where in the memory its mark is.
        busy_at: the byte of the memory that says whether it is being written.
        step: steps done.
        directory: the run directory.
        keep: how many checkpoints stay.
    """

    key: int
    start: int
    stop: int
    blob_at: int
    mark_at: int
    busy_at: int
    step: int
    directory: str
    keep: int

    @classmethod
    def of(cls, places: Places, slot: int, step: int, directory: str, keep: int) -> Kept:
        """Describe one of the two slots of a memory."""
        start = places.slots_at[slot]
        stop = start + places.slot_bytes
        marks = places.mark_at(slot), places.busy_at(slot)
        return cls(places.key, start, stop, places.blob_at, *marks, step, directory, keep)

    def as_json(self) -> dict[str, Any]:
        """Write it as plain JSON."""
        return asdict(self)


def newest_kept(memory: mmap.mmap, loop: Mapping[str, Any]) -> Kept | None:
    """Find the newest whole snapshot of a loop, by what was told when it began."""
    places = Places.from_json(dict(loop))
    slot = places.newest(lambda offset, count: memory[offset : offset + count])
    if slot is None:
        return None
    start = places.slots_at[slot]
    with memoryview(memory) as whole, whole[start : start + places.slot_bytes] as view:
        facts = read_facts(view, places.blob_at)
    return Kept.of(places, slot, facts["position"]["step"], loop["directory"], loop["keep"])


class _AskedForError(OSError):
    """A full disk that a test has asked for. Final."""


class CheckpointWriter:
    """Writes snapshots as checkpoints, one after the other. Final.

    Args:
        say: where troubles are told.
        is_full: whether the disk is to be full for the n-th checkpoint, for tests.

    Attributes:
        locks: the directories that are this job's alone; nothing is written in others.
    """

    def __init__(
        self, say: Callable[[str], None], is_full: Callable[[int], bool] = lambda number: False
    ) -> None:
        self.locks = DirectoryLocks(say)
        self._say = say
        self._is_full = is_full
        self._thread: threading.Thread | None = None
        self._num_begun = 0

    def begin(self, memory: mmap.mmap, kept: Kept, done: Callable[[], None] = lambda: None) -> None:
        """Begin to write a snapshot, after the one before is written.

        Args:
            memory: the whole memory `kept` speaks of.
            kept: the snapshot.
            done: called from the thread when it is written or has failed.
        """
        self.wait()
        self._num_begun += 1
        memory[kept.busy_at : kept.busy_at + 1] = BUSY
        self._thread = threading.Thread(
            target=self._write, args=(memory, kept, done, self._num_begun), name="unisono-writer"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, memory: mmap.mmap, kept: Kept, done: Callable[[], None], number: int) -> None:
        try:
            if self._is_full(number):
                raise _AskedForError(errno.ENOSPC, "No space left on device (asked for)")
            self.locks.hold(Path(kept.directory))
            with memoryview(memory) as whole, whole[kept.start : kept.stop] as slot:
                store = RunDirectory(Path(kept.directory), kept.keep)
                if not store.has(kept.step):
                    mark = _mark(memory, kept)
                    facts = read_facts(slot, kept.blob_at)
                    _check_same(mark, mark if facts["position"]["step"] == kept.step else b"")
                    files = files_of(slot, kept.blob_at)
                    last = _checked_after(files[RUN_FILE], mark, memory, kept)
                    store.write(kept.step, {**files, RUN_FILE: last})
        except (OSError, ValueError, CheckpointError) as error:
            self._say(f"step {kept.step}: no checkpoint: {_told(error, memory, kept)}")
        finally:
            memory[kept.busy_at : kept.busy_at + 1] = FREE
            done()


def _mark(memory: mmap.mmap, kept: Kept) -> bytes:
    return memory[kept.mark_at : kept.mark_at + 8]


def _checked_after(
    chunks: Iterable[Data], mark: bytes, memory: mmap.mmap, kept: Kept
) -> Iterator[Data]:
    """Give the last file of a checkpoint, then see that the snapshot has stayed what it was."""
    yield from chunks
    _check_same(mark, _mark(memory, kept))


def _check_same(before: bytes, after: bytes) -> None:
    if not any(before) or before != after:
        raise ValueError("a snapshot must stay as it is until it is written, but has changed")


def _told(error: Exception, memory: mmap.mmap, kept: Kept) -> str:
    why = str(error).removesuffix(".")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        with suppress(OSError, ValueError):
            num_bytes = _bytes_of(memory, kept)
            if isinstance(error, _AskedForError):
                why = told_missing(num_bytes, 0)
            else:
                why = told_room(Path(kept.directory), num_bytes, error.errno)
    return f"{why}; training goes on, the next one is tried."


def _bytes_of(memory: mmap.mmap, kept: Kept) -> int:
    """Count the bytes of the checkpoint's files."""
    with memoryview(memory) as whole, whole[kept.start : kept.stop] as slot:
        files = files_of(slot, kept.blob_at)
        sizes = {name: sum(memoryview(data).nbytes for data in files[name]) for name in FILES}
    return sum(sizes.values()) + len(commit_of(dict.fromkeys(FILES, "0" * 64), sizes))

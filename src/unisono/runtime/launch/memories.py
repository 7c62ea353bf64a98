"""Who owns the memory that workers share? The launcher, so that it outlives every worker.

Invariant: all requests with one key get the same memfd, or file of predictions. The launcher closes
it once all living workers have released it, unless a replacement may need it, or when the job ends.
A replacement may need the ends of all loops: older ones share one file, and so one descriptor.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

from unisono.runtime.checkpoint.slots import MARKS_BYTES, Places, used_bytes
from unisono.runtime.procfs import create_memory
from unisono.runtime.workers.launcher_messages import DATA_KEYS, ROW_KEYS
from unisono.runtime.workers.memory import give_pages_back

_DISK_SPARE = 4  # a temporary file may use at most a quarter of the free disk space


_Stored = tuple[int, int, int]  # the place in the file, the place in memory, the size


@dataclass(slots=True)
class _Shared:
    fd: int  # negative: it is only in the file of ended loops
    num_bytes: int
    first_rank: int
    held_by: set[int] = field(default_factory=set)
    mapping: mmap.mmap | None = None
    # the start and size of the one snapshot that is left; None: there is more
    kept: tuple[int, int] | None = None
    stored: tuple[_Stored, ...] = ()  # its parts in that file


@final
class SharedMemories:
    """The memfds of one job."""

    def __init__(self) -> None:
        self._by_key: dict[int, _Shared] = {}
        self._ended = -1  # the file with the ends of older loops, one after the other

    def request(self, rank: int, key: int, num_bytes: int) -> int:
        """Return the descriptor of memory `key`, which the launcher owns, or raise."""
        if key not in self._by_key:
            self._by_key[key] = _Shared(fd := _create(key, num_bytes), num_bytes, rank)
            _allow_files_beyond(fd)
        shared = self._by_key[key]
        if shared.num_bytes != num_bytes:
            raise ValueError(
                f"all workers must share memory of the same size in the same order, but request "
                f"{key} of worker {shared.first_rank} is for {shared.num_bytes} bytes and that "
                f"of worker {rank} for {num_bytes}: build the same model on every worker."
            )
        if shared.stored:
            self._reopen(shared)
        else:
            shared.kept = None
        shared.held_by.add(rank)
        return shared.fd

    def mapping(self, key: int) -> mmap.mmap | None:
        """Return a mapping of memory `key`; None if it is gone."""
        shared = self._by_key.get(key)
        if shared is None:
            return None
        if shared.mapping is None:
            try:
                self._reopen(shared)
            except OSError:  # no room
                return None
            shared.mapping = mmap.mmap(shared.fd, shared.num_bytes)
        return shared.mapping

    def release(self, rank: int, key: int) -> None:
        """Record that `rank` no longer needs memory `key`."""
        if key in self._by_key:
            self._by_key[key].held_by.discard(rank)

    def forget(self, rank: int) -> None:
        """Record that `rank` is gone."""
        for shared in self._by_key.values():
            shared.held_by.discard(rank)

    def drop_unused(self, still_needed: Collection[int]) -> None:
        """Close memory without users, except these keys, datasets and predictions."""
        for key in [key for key, shared in self._by_key.items() if not shared.held_by]:
            if key not in still_needed and key < DATA_KEYS:
                self._drop(self._by_key.pop(key))

    def shrink(self, key: int, places: Places) -> int:
        """Leave only the newest snapshot in memory without users; return its size, or 0."""
        shared = self._by_key.get(key)
        if shared is None or shared.held_by or shared.stored:
            return 0
        mapping = self.mapping(key)
        assert mapping is not None
        slot = places.newest(lambda offset, count: mapping[offset : offset + count])
        if shared.kept is None and slot is not None:
            start = places.slots_at[slot]
            stop = start + places.slot_bytes
            with memoryview(mapping) as whole, whole[start:stop] as view:
                shared.kept = start, used_bytes(view, places.blob_at)
            marks_stop = places.marks_at + mmap.PAGESIZE
            for gap in ((0, places.marks_at), (marks_stop, start), (stop, shared.num_bytes)):
                give_pages_back(mapping, *gap)
        return 0 if shared.kept is None else shared.kept[1]

    def move_to_disk(self, key: int, places: Places) -> None:
        """Move what :meth:`shrink` left to an unnamed file; drop it if the disk lacks space."""
        shared = self._by_key.get(key)
        if shared is None or shared.kept is None or shared.held_by or shared.fd < 0:
            return
        try:
            if self._ended < 0:
                self._ended = _unnamed_file()
            if shared.stored:
                changed = shared.stored[:1]  # a replacement may have set a mark
            else:
                changed = self._reserve(places.marks_at, shared.kept)
            for at, start, num_bytes in changed:
                _copy(shared.fd, start, self._ended, at, num_bytes)
        except OSError:
            self._drop(self._by_key.pop(key))
            return
        self._drop(shared)
        shared.stored = shared.stored or changed

    def close(self) -> None:
        """Close everything."""
        while self._by_key:
            self._drop(self._by_key.popitem()[1])
        if self._ended >= 0:
            os.close(self._ended)

    def _reserve(self, marks_at: int, kept: tuple[int, int]) -> tuple[_Stored, ...]:
        """Return places for the marks and a snapshot at the end of the file, or raise."""
        room = os.fstatvfs(self._ended)
        if room.f_bavail * room.f_frsize < _DISK_SPARE * kept[1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        end = os.fstat(self._ended).st_size
        return (end, marks_at, MARKS_BYTES), (end + MARKS_BYTES, *kept)

    def _reopen(self, shared: _Shared) -> None:
        """Copy the end of a loop to a file laid out as its memory was, unless it is open."""
        if shared.fd >= 0:
            return
        fd = _unnamed_file()
        try:
            os.truncate(fd, shared.num_bytes)
            for at, start, num_bytes in shared.stored:
                _copy(self._ended, at, fd, start, num_bytes)
        except OSError:
            os.close(fd)
            raise
        shared.fd = fd

    def _drop(self, shared: _Shared) -> None:
        if shared.fd >= 0:
            os.close(shared.fd)
        if shared.mapping is not None:
            shared.mapping.close()
        shared.fd, shared.mapping = -1, None


def _allow_files_beyond(fd: int) -> None:
    """Allow twice as many open files once half are: each prediction keeps one, for replacements."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if soft < 2 * fd and soft < more:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _copy(source: int, source_at: int, target: int, target_at: int, num_bytes: int) -> None:
    os.lseek(target, target_at, os.SEEK_SET)
    while num_bytes:
        copied = os.sendfile(target, source, source_at, num_bytes)
        if not copied:
            raise OSError(errno.EIO, "the file of ended loops is shorter than it was")
        source_at, num_bytes = source_at + copied, num_bytes - copied


def _create(key: int, num_bytes: int) -> int:
    if key < ROW_KEYS:
        return create_memory("unisono-memory", num_bytes)
    fd = _unnamed_file()
    try:
        # Now, while an error can be reported: a mapped file on a full disk ends the process.
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd

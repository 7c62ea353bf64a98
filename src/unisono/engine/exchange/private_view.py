"""One worker's private view of shared memory: only this worker sees what its program writes there.

Reads return what the others write and cost no memory. Any write copies the page for this process
alone (``MAP_PRIVATE``), and the kernel records which pages were copied.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import resource
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from unisono.engine.exchange.arena import Region, size_of
from unisono.errors import MismatchError
from unisono.runtime.workers.memory import Memory, give_pages_back, in_pages
from unisono.runtime.workers.team import Team
from unisono.runtime.world import per_process

Ranges = list[tuple[int, int]]
"""Bytes from where to where, in whole pages, in order."""

_PAGE = mmap.PAGESIZE
_NAME_LETTERS = 14  # purposes have 24


@final
class PrivateView:
    """A view of neighbouring regions of a memory; bytes are counted from the first region.

    Args:
        shared: the memory; must have been mapped from a descriptor.
        regions: of that memory, one after the other, in whole pages.

    Attributes:
        regions: the same regions in the view.
        starts: the first byte of each region.
    """

    def __init__(self, shared: Memory, regions: Sequence[Region]) -> None:
        start = regions[0].start
        self.starts = [region.start - start for region in regions]
        num_bytes = self.starts[-1] + in_pages(size_of(regions[-1].slots))
        self._num_bytes = num_bytes = max(num_bytes, _PAGE)
        self._shared, self._start = shared, start
        self._there = shared.flat(start, num_bytes, torch.uint8)
        self.memory = shared.private_view(start, num_bytes)
        self.regions = [
            Region(self.memory, at, region.slots)
            for at, region in zip(self.starts, regions, strict=True)
        ]
        self._bytes = self.memory.flat(0, num_bytes, torch.uint8)
        self._both = self.memory.view(0, num_bytes), shared.view(start, num_bytes)
        self._pagemap = -1
        self._look: Callable[[PrivateView], Ranges] = PrivateView._look_at_bytes
        self._num_faults: Callable[[], int] = itertools.count().__next__  # as if there were some
        self._faults_then = -1
        with suppress(OSError):  # gVisor has none
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
            self._closing = weakref.finalize(self, os.close, self._pagemap)
            self._closing.atexit = False
            self._ask_the_kernel()

    def changed(self) -> Ranges:
        """Return the pages that this process has written to since :meth:`forget`.

        The first write to a page is a page fault: without one since the last search that found
        nothing, there is nothing to search.
        """
        faults = self._num_faults()
        if faults == self._faults_then:
            return []
        found = self._look(self)
        self._faults_then = -1 if found else faults
        return found

    def publish_changes(self, team: Team, *, alone: bool = False) -> Ranges:
        """Copy the pages that all workers changed alike to the shared memory, and return them.

        Collective if anything was changed, unless this worker copies all of it `alone`.
        """
        changed = self.changed()
        if alone or not changed:
            self._publish(changed, 0, 1)
            return changed
        name = next(self.names(changed), "")
        if not name:
            return changed  # to what it was before
        if team.size > 1:
            check_changed_alike(team, name, self._hash_of(changed), lambda: self._hashes(changed))
        purpose = _purpose_of(name)
        while True:
            here = team.neighbours
            self._publish(changed, here.index(team.world.rank), len(here))
            if team.meet(purpose):  # else a worker was lost, and the others publish its share
                return changed

    def names(self, ranges: Ranges) -> Iterator[str]:
        """Yield the names of tensors in these pages that differ from the shared memory."""
        for name, (first, last) in self.places(ranges).items():
            if not torch.equal(self._bytes[first:last], self._there[first:last]):
                yield name

    def _hashes(self, changed: Ranges) -> dict[str, int]:
        return {name: self._hash_of([at]) for name, at in self.places(changed).items()}

    def places(self, ranges: Ranges) -> dict[str, tuple[int, int]]:
        """Return the first and the last byte (exclusive) of the tensors that overlap ranges."""
        return {
            slot.name: (first, last)
            for start, region in zip(self.starts, self.regions, strict=True)
            for slot in region.slots
            for first, last in [(start + slot.offset, start + slot.end)]
            if any(first < stop and begin < last for begin, stop in ranges)
        }

    def _publish(self, ranges: Ranges, position: int, size: int) -> None:
        for start, stop in ranges:
            pages = (stop - start) // _PAGE
            first, last = (start + pages * n // size * _PAGE for n in (position, position + 1))
            self._there[first:last].copy_(self._bytes[first:last])

    def _hash_of(self, ranges: Ranges) -> int:
        """Return a 32-bit hash of ranges and of their bytes in this process."""
        value = zlib.crc32(repr(ranges).encode())
        for start, stop in ranges:
            value = zlib.crc32(self.memory.view(start, stop - start), value)
        return value

    def forget(self, ranges: Ranges) -> None:
        """Discard this process's copies of pages, and map the shared memory again."""
        for start, stop in ranges:
            self.memory.mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def forget_all(self) -> None:
        """Discard all copies of this process, and map the shared memory again."""
        self.forget([(0, self._num_bytes)])

    def make_private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor, and release its shared memory, for all processes."""
        copied, at = tensor.clone(), tensor.data_ptr() - self._bytes.data_ptr()
        if 0 <= at < self._num_bytes:
            give_pages_back(
                self._shared.mapping, self._start + at, self._start + at + tensor.nbytes
            )
        return copied

    def _ask_the_kernel(self) -> None:
        """Use the kernel's page map from now on, if it reports a test write exactly."""
        kernel = per_process(_Kernel)
        if not kernel.is_known:
            before, faults = self._look_at_pages(), _faults()
            self._bytes[:1] += 0
            kernel.counts_faults, found = _faults() > faults, self._look_at_pages()
            self.forget(found)
            is_exact = before == [] and found == [(0, _PAGE)] and self._look_at_pages() == []
            kernel.is_known, kernel.is_exact = True, is_exact
        if kernel.is_exact:
            self._look = PrivateView._look_at_pages
            if kernel.counts_faults:
                self._num_faults = _faults

    def _look_at_pages(self) -> Ranges:
        """Return the pages that the kernel reports as changed: proc_pid_pagemap(5), bits 61–63."""
        if not self._closing.alive:  # by the garbage collector, before it ends an abandoned loop
            return self._look_at_bytes()
        at, num_bytes = self._bytes.data_ptr() // _PAGE * 8, self._num_bytes // _PAGE * 8
        entries = np.frombuffer(os.pread(self._pagemap, num_bytes, at), dtype=np.uint64)
        bits = entries >> np.uint64(61)
        return _ranges(((bits & 1) == 0) & (bits > 1))

    def _look_at_bytes(self) -> Ranges:
        """Return the pages that differ, comparing all bytes; used without a page map."""
        here, there = (np.frombuffer(view, np.uint64) for view in self._both)
        return _ranges((here != there).reshape(-1, _PAGE // 8).any(1))


@dataclass
class _Kernel:
    """What the kernel reports of writes to private pages, as far as a view has tried it."""

    is_known: bool = False
    is_exact: bool = False
    counts_faults: bool = False


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def check_changed_alike(
    team: Team, name: str, value: int, hashes: Callable[[], Mapping[str, int]]
) -> None:
    """Raise MismatchError if workers made different changes. Collective for those with any.

    Args:
        name: the first tensor that this worker has changed.
        value: a 32-bit hash of all its changes.
        hashes: returns hashes by name, called if the values differ.
    """
    votes: dict[int, int] | None = None
    try:
        while votes is None:
            # A worker without changes comes to another barrier, whose error has the name.
            votes = team.vote(value, _purpose_of(name))
    except MismatchError as error:
        raise _unlike(f"rank {team.world.rank} has changed `{name}` and another not") from error
    if len(set(votes.values())) > 1:
        check_alike(team, hashes())


def _purpose_of(name: str) -> str:
    return f"change of {name[-_NAME_LETTERS:]}"


def check_alike(team: Team, hashes: Mapping[str, int]) -> None:
    """Compare tensors by their hashes; raise MismatchError that names a difference. Collective."""
    heard = team.gather(json.dumps(hashes).encode(), "changes between steps")
    said = {rank: json.loads(message) for rank, message in heard.items()}
    first = min(said)
    for rank, there in said.items():
        for name in {**said[first], **there}:
            if there.get(name) != said[first].get(name):
                raise _unlike(f"`{name}` is not the same on ranks {first} and {rank}")


def _unlike(seen: str) -> MismatchError:
    return MismatchError(
        f"what a program changes of parameters, buffers and optimizer state between two steps must "
        f"be the same on every worker, but {seen}: change it on every worker, not under "
        f"`if rank == 0` (nor by a forward pass there without `model.eval()`), and draw with the "
        f"default generators, which are seeded alike between two steps."
    )


def _ranges(is_changed: np.ndarray) -> Ranges:
    bounds = np.flatnonzero(np.diff(is_changed.astype(np.int8), prepend=0, append=0))
    return [(int(a) * _PAGE, int(b) * _PAGE) for a, b in bounds.reshape(-1, 2)]

"""One worker's view of memory that all share: what the program writes there, it alone sees.

Reading shows what the others write and costs no memory. A write, by whatever way, copies the page
for this process alone (``MAP_PRIVATE``), and the kernel knows which pages these are.
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
from typing import final

import numpy as np
import torch

from unisono.engine.exchange.arena import Region, in_pages, size_of
from unisono.errors import MismatchError
from unisono.runtime.workers.memory import Memory, give_pages_back
from unisono.runtime.workers.team import Team

Ranges = list[tuple[int, int]]
"""Bytes from where to where, in whole pages, in order."""

_PAGE = mmap.PAGESIZE
_NAME_LETTERS = 14  # purposes have 24


@final
class PrivateView:
    """A view of neighbouring regions of a memory; bytes are counted from their first.

    Args:
        shared: the memory; must have been mapped from a descriptor.
        regions: of that memory, one after the other, in whole pages.

    Attributes:
        regions: the same in the view.
        starts: the first byte of each.
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
            weakref.finalize(self, os.close, self._pagemap).atexit = False
            self._ask_the_kernel()

    def changed(self) -> Ranges:
        """Find the pages that this process has written to since it forgot them.

        The first write to a page is a fault, so nothing is looked at where there was none since a
        look that has found nothing.
        """
        faults = self._num_faults()
        if faults == self._faults_then:
            return []
        found = self._look(self)
        self._faults_then = -1 if found else faults
        return found

    def publish_changes(self, team: Team, *, alone: bool = False) -> Ranges:
        """Write what all have changed alike to the shared memory, and say where.

        Collective, if anything was changed and this worker does not write all of it `alone`.
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
            if team.meet(purpose):  # else somebody was lost, whose share the others publish
                return changed

    def names(self, ranges: Ranges) -> Iterator[str]:
        """Name the tensors there that are not the same in the shared memory."""
        for name, (first, last) in self.places(ranges).items():
            if not torch.equal(self._bytes[first:last], self._there[first:last]):
                yield name

    def _hashes(self, changed: Ranges) -> dict[str, int]:
        return {name: self._hash_of([at]) for name, at in self.places(changed).items()}

    def places(self, ranges: Ranges) -> dict[str, tuple[int, int]]:
        """Name the tensors that have a part there, with their first byte and the one behind."""
        return {
            slot.name: (first, last)
            for start, region in zip(self.starts, self.regions, strict=True)
            for slot in region.slots
            for first, last in [(start + slot.offset, start + slot.end)]
            if any(first < stop and begin < last for begin, stop in ranges)
        }

    def _publish(self, ranges: Ranges, position: int, size: int) -> None:
        """Write one worker's share to the shared memory."""
        for start, stop in ranges:
            pages = (stop - start) // _PAGE
            first, last = (start + pages * n // size * _PAGE for n in (position, position + 1))
            self._there[first:last].copy_(self._bytes[first:last])

    def _hash_of(self, ranges: Ranges) -> int:
        """Hash what this process sees there, and where that is; 32 bits."""
        value = zlib.crc32(repr(ranges).encode())
        for start, stop in ranges:
            value = zlib.crc32(self.memory.view(start, stop - start), value)
        return value

    def forget(self, ranges: Ranges) -> None:
        """Show the shared memory again, there."""
        for start, stop in ranges:
            self.memory.mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def forget_all(self) -> None:
        """Show the shared memory again, everywhere."""
        self.forget([(0, self._num_bytes)])

    def take_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor, and give the memory that it had here back, that of all who share it."""
        copied, at = tensor.clone(), tensor.data_ptr() - self._bytes.data_ptr()
        if 0 <= at < self._num_bytes:
            give_pages_back(
                self._shared.mapping, self._start + at, self._start + at + tensor.nbytes
            )
        return copied

    def _ask_the_kernel(self) -> None:
        """Look at pages from now on, if that finds one that was written to, and no other."""
        before, faults = self._look_at_pages(), _faults()
        self._bytes[:1] += 0
        has_counted, found = _faults() > faults, self._look_at_pages()
        self.forget(found)
        if before == [] and found == [(0, _PAGE)] and self._look_at_pages() == []:
            self._look = PrivateView._look_at_pages
            if has_counted:
                self._num_faults = _faults

    def _look_at_pages(self) -> Ranges:
        """Read what the kernel tells of each page: proc_pid_pagemap(5), bits 61 to 63."""
        at, num_bytes = self._bytes.data_ptr() // _PAGE * 8, self._num_bytes // _PAGE * 8
        entries = np.frombuffer(os.pread(self._pagemap, num_bytes, at), dtype=np.uint64)
        bits = entries >> np.uint64(61)
        return _ranges(((bits & 1) == 0) & (bits > 1))

    def _look_at_bytes(self) -> Ranges:
        """Compare all bytes, where the kernel tells nothing."""
        here, there = (np.frombuffer(view, np.uint64) for view in self._both)
        return _ranges((here != there).reshape(-1, _PAGE // 8).any(1))


def _faults() -> int:
    """Count the page faults of this process, those of its threads among them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def check_changed_alike(
    team: Team, name: str, value: int, hashes: Callable[[], Mapping[str, int]]
) -> None:
    """See that all have changed something alike between two steps. Collective for who has.

    Args:
        name: of the first tensor that this worker has changed.
        value: stands for all that it has changed, 32 bits.
        hashes: gives them by name, where they differ.
    """
    votes: dict[int, int] | None = None
    try:
        while votes is None:
            # Who has changed nothing comes to another meeting, and is told the name.
            votes = team.vote(value, _purpose_of(name))
    except MismatchError as error:
        raise _unlike(f"rank {team.world.rank} has changed `{name}` and another not") from error
    if len(set(votes.values())) > 1:
        check_alike(team, hashes())


def _purpose_of(name: str) -> str:
    return f"change of {name[-_NAME_LETTERS:]}"


def check_alike(team: Team, hashes: Mapping[str, int]) -> None:
    """Compare tensors by their hashes, and raise MismatchError that names one. Collective."""
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

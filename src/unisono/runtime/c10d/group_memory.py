"""The shared memory of a group's ranks: its layout, and how a rank reads and writes it.

::

    line of rank 0 … W−1 │ ring 0→0, 0→1, … │ slots of rank 0 … W−1 │ heap of rank 0 … W−1

* A *line* has a rank's number of arrivals, its current call, and whether it has left.
* A *ring* holds the messages from one rank to another that have not been fetched yet.
* Two *slots* per rank hold what a rank shows the others at even and at odd barriers.
* A *heap* is where a rank stores the contents of its messages.

All positions are byte offsets from the beginning and multiples of 64. Each line, and each counter
that two ranks use, has separate cache lines. A tensor may outlive its group.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import final

from unisono.runtime.workers import meeting_point as futex
from unisono.runtime.workers.meeting_point import MeetingSeat
from unisono.runtime.workers.memory import Memory, give_pages_back, in_pages

LINE_BYTES = 1024
# Offsets inside a line.
PID, CALLS, DOORBELL, POSTS, REASON = 8, ctypes.sizeof(MeetingSeat), 64, 128, 512
POST_BYTES = 192  # a text and a zero
POST_TEXT_BYTES = POST_BYTES - 1
REASON_BYTES = LINE_BYTES - REASON
# Offsets inside a ring.
SENT, TAKEN, ENTRIES = 0, 64, 128
RING_ENTRIES = 1024
ENTRY_BYTES = 32
RING_BYTES = ENTRIES + RING_ENTRIES * ENTRY_BYTES

SLOT_BYTES = 2 << 20  # the data of one barrier: a barrier costs more than cache misses
_HEAPS_AT_MOST_BYTES = 1 << 40  # of the 2⁴⁷ bytes of addresses that all groups share


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of all parts, from two numbers that all ranks agree on."""

    world_size: int  # the number of ranks in the group
    heap_bytes: int  # the size of each rank's heap; a multiple of the page size

    @classmethod
    def for_this_machine(cls, world_size: int) -> Layout:
        """Return a layout; heaps have twice the machine's memory, at most 1 TiB in total."""
        machine_bytes = mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES")
        heap_bytes = min(2 * machine_bytes, _HEAPS_AT_MOST_BYTES // world_size)
        return cls(world_size, in_pages(heap_bytes))

    @property
    def control_bytes(self) -> int:
        """The total size of lines and rings."""
        return in_pages(self.ring(self.world_size, 0))

    @property
    def num_bytes(self) -> int:
        """The total size."""
        return self.heap(self.world_size).start

    def line(self, rank: int) -> int:
        """Return where the line of `rank` begins."""
        return rank * LINE_BYTES

    def post(self, rank: int, num_calls: int) -> int:
        """Return where `rank` posts its call of that number: two places alternate."""
        return self.line(rank) + POSTS + num_calls % 2 * POST_BYTES

    def ring(self, source: int, destination: int) -> int:
        """Return where the ring of messages from `source` to `destination` begins."""
        lines_end = self.line(self.world_size)
        return lines_end + (source * self.world_size + destination) * RING_BYTES

    def slot(self, rank: int, parity: int) -> int:
        """Return where the slot of `rank` for even (0) or odd (1) barriers begins."""
        return self.control_bytes + (2 * rank + parity) * SLOT_BYTES

    def heap(self, rank: int) -> range:
        """Return the bytes of the heap of `rank`."""
        start = self.slot(self.world_size, 0) + rank * self.heap_bytes
        return range(start, start + self.heap_bytes)


@final
class GroupMemory:
    """One rank's mapping of the group's memory; words are at offsets before the slots."""

    def __init__(self, mapping: mmap.mmap, layout: Layout) -> None:
        self.layout = layout
        self.mapping = mapping
        lines = map(layout.line, range(layout.world_size))
        self.seats = [MeetingSeat.from_buffer(mapping, line) for line in lines]
        self.memory = Memory(mapping)
        self.words = (ctypes.c_uint32 * (layout.control_bytes // 4)).from_buffer(mapping)
        self.address = ctypes.addressof(self.words)

    def word(self, offset: int) -> int:
        """Return the 32-bit word at `offset`."""
        return self.words[offset // 4]

    def add_and_wake(self, offset: int, amount: int = 1) -> None:
        """Add to a word after all earlier writes, and wake those that sleep on it."""
        futex.add_and_wake(self.address + offset, amount)


_KEEP_PAGES_UP_TO_BYTES = 64 << 20


@final
class Blocks:
    """The blocks of one heap, each of 2ⁿ bytes; only one thread may use it at a time."""

    def __init__(self, mapping: mmap.mmap, heap: range) -> None:
        self._mapping, self._rest = mapping, heap
        self._size_of: dict[int, int] = {}
        self._free_of: dict[int, list[int]] = defaultdict(list)

    def take(self, num_bytes: int) -> int:
        """Allocate a block and return where it begins, a multiple of 64."""
        size = 1 << max(6, (num_bytes - 1).bit_length())
        if self._free_of[size]:
            return self._free_of[size].pop()
        if size > len(self._rest):
            raise MemoryError(
                f"messages nobody has received must fit into the machine's memory, but there is "
                f"no room for {size:,} bytes more: receive what was sent."
            )
        start, self._rest = self._rest.start, self._rest[size:]
        self._size_of[start] = size
        return start

    def give_back(self, start: int) -> None:
        """Free the block that begins at `start`."""
        size = self._size_of[start]
        if size > _KEEP_PAGES_UP_TO_BYTES:  # its pages go back to the kernel
            give_pages_back(self._mapping, start, start + size)
        self._free_of[size].append(start)

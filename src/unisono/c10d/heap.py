"""Allocates blocks in a rank's heap: first fit, free neighbours joined.

Only the owning rank allocates and frees. The pages of a large block go back to the kernel.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from collections import deque

from unisono.workers.memory import aligned, give_pages_back

_KEEP_PAGES_UP_TO_BYTES = 64 << 20


class HeapFullError(MemoryError):
    """More was asked for than a heap, which is as large as the machine's memory, has left."""


class Blocks:
    """The free and the taken blocks of one heap. Final.

    Args:
        mapping: the memory that the heap lies in.
        heap: which part of it.
    """

    def __init__(self, mapping: mmap.mmap, heap: range) -> None:
        self._mapping = mapping
        self._free = [heap]
        self._size_of: dict[int, int] = {}
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> int:
        """Reserve a block and return where it begins, a multiple of 64.

        Raises:
            HeapFullError: no gap is large enough.
        """
        with self._lock:
            self._accept_returned()
            return self._first_fit(max(aligned(num_bytes), 64))

    def give_back(self, offset: int) -> None:
        """Return the block that begins at `offset`; from any thread, also inside a collection."""
        self._returned.append(offset)

    def _first_fit(self, size: int) -> int:
        for position, gap in enumerate(self._free):
            if len(gap) >= size:
                self._free[position : position + 1] = (
                    [range(gap.start + size, gap.stop)] if len(gap) > size else []
                )
                self._size_of[gap.start] = size
                return gap.start
        taken = sum(self._size_of.values())
        raise HeapFullError(
            f"messages nobody has received must fit into the machine's memory, but {taken:,} bytes "
            f"are taken and no gap holds {size:,} more: receive what was sent."
        )

    def _accept_returned(self) -> None:
        while self._returned:
            offset = self._returned.popleft()
            size = self._size_of.pop(offset)
            if size > _KEEP_PAGES_UP_TO_BYTES:
                give_pages_back(self._mapping, offset, offset + size)
            self._join(offset, offset + size)

    def _join(self, start: int, stop: int) -> None:
        position = bisect.bisect(self._free, start, key=lambda gap: gap.start)
        if position < len(self._free) and self._free[position].start == stop:
            stop = self._free.pop(position).stop
        if position > 0 and self._free[position - 1].stop == start:
            position -= 1
            start = self._free.pop(position).start
        self._free.insert(position, range(start, stop))

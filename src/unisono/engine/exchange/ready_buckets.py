"""Which buckets all workers of a host have published, counted in shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import final

from typing_extensions import override

from unisono.engine.exchange.bucket_pipeline import BucketProgress
from unisono.runtime.workers import meeting_point as futex

_WORD = 1 << 32
_ADD_AT_MOST = 2047


@final
class ReadyBuckets(BucketProgress):
    """Counts the buckets that all workers of a host have left in the host's memory.

    Each worker counts its ready buckets in its own field of that memory. The counts continue from
    step to step and are equal between two steps.

    Args:
        counts: where each worker counts, 4 bytes.
        position: this worker's among them.

    Attributes:
        tell: called after this worker has counted a bucket.
    """

    def __init__(
        self, counts: Sequence[memoryview], position: int, indices: Sequence[Sequence[int]]
    ) -> None:
        self.tell: Callable[[], None] = lambda: None
        self._counts = [ctypes.c_uint32.from_buffer(count) for count in counts]
        self._own = self._counts[position]
        super().__init__(indices)

    def begin(self) -> None:
        """Begin a step: nothing is ready."""
        super().begin()
        self._base, self._told = self._own.value, 0

    @override
    def mark(self, index: int) -> list[int]:
        """Record a gradient, and publish how many buckets are ready in their order."""
        new = super().mark(index)
        self._notify()
        return new

    def mark_all(self) -> None:
        """Mark all buckets of this worker as ready."""
        self.num_ready = len(self.missing)
        self._notify()

    @property
    def has_all(self) -> bool:
        """Whether all buckets of this worker are ready."""
        return self.num_ready == len(self.missing)

    def count(self) -> int:
        """Return how many buckets are ready on all workers of the host."""
        # A worker that has not begun the step still has the count with which the last one ended.
        number = min((count.value - self._base) % _WORD for count in self._counts)
        futex.acquire(ctypes.addressof(self._own))
        return number

    def _notify(self) -> None:
        while self._told < self.num_ready:
            more = min(self.num_ready - self._told, _ADD_AT_MOST)
            futex.add_and_wake(ctypes.addressof(self._own), more)
            self._told += more
            self.tell()

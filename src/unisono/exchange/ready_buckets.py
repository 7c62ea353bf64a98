"""Which buckets can leave a host: all its workers have left their gradients of them in its memory.

Each worker counts, in a place of its own in that memory, up to which bucket it has come; buckets
leave in one order. The counts go on from step to step and are equal between two steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from unisono.workers import futex

_WORD = 1 << 32
_ADD_AT_MOST = 2047


class ReadyBuckets:
    """What the workers of a host have come to in a step, as one of them sees it. Final.

    Args:
        counts: where the workers count, 4 bytes for each.
        position: which of them is this one.
        indices: the parameters of each bucket, in the order in which they leave.
        num_parameters: how many parameters there are.

    Attributes:
        tell: called when this worker has come to a bucket.
    """

    def __init__(
        self,
        counts: Sequence[memoryview],
        position: int,
        indices: Sequence[Sequence[int]],
        num_parameters: int,
    ) -> None:
        self.tell: Callable[[], None] = lambda: None
        self._counts = [ctypes.c_uint32.from_buffer(count) for count in counts]
        self._own = self._counts[position]
        self._sizes = list(map(len, indices))
        self._buckets_of: list[list[int]] = [[] for _ in range(num_parameters)]
        for number, own in enumerate(indices):
            for index in own:
                self._buckets_of[index].append(number)
        self.begin()

    def begin(self) -> None:
        """Begin a step: nothing is ready."""
        self._base, self._come = self._own.value, 0
        self._missing = self._sizes.copy()
        self._seen: set[int] = set()
        self.is_outdated = False

    def mark(self, index: int) -> None:
        """Take note that this worker has left a parameter's gradient, maybe another than before."""
        if index in self._seen:
            self.mark_changed([index])
            return
        self._seen.add(index)
        for number in self._buckets_of[index]:
            self._missing[number] -= 1
        come = self._come
        while come < len(self._missing) and not self._missing[come]:
            come += 1
        self._come_to(come)

    def mark_changed(self, indices: Sequence[int]) -> None:
        """Take note that parameters have other gradients than before."""
        self.is_outdated |= any(
            number < self._come for index in indices for number in self._buckets_of[index]
        )

    def mark_all(self) -> None:
        """Take note that all that this worker has is there."""
        self._come_to(len(self._sizes))

    @property
    def has_all(self) -> bool:
        """Whether this worker has come to all buckets."""
        return self._come == len(self._sizes)

    def count(self) -> int:
        """Tell how many buckets all workers of the host have come to."""
        # Who has not begun the step counts what all did when the last one ended.
        number = min((count.value - self._base) % _WORD for count in self._counts)
        futex.acquire(ctypes.addressof(self._own))
        return number

    def _come_to(self, number: int) -> None:
        while self._come < number:
            more = min(number - self._come, _ADD_AT_MOST)
            futex.add_and_wake(ctypes.addressof(self._own), more)
            self._come += more
            self.tell()

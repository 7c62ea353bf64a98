"""A worker's last part, published one parameter at a time while its backward pass goes on.

Which buckets can leave a host: all its workers have left their gradients of them in its memory.

Each worker counts, in a place of its own in that memory, up to which bucket it has come; buckets
leave in one order. The counts go on from step to step and are equal between two steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from unisono.engine.exchange.arena import Slot
from unisono.engine.exchange.bucket_pipeline import bucket_ranges
from unisono.engine.exchange.parts import Gradients, Parts
from unisono.plan.summation import Node
from unisono.runtime.workers import meeting_point as futex


class EarlyPart:
    """What has been published early, and what is to be published again. Final.

    A gradient may change after it was published, by a hook of the program, or be taken away: when
    the part is published as a whole, what is another tensor then, or another version of it, counts.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._put: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether anything of the step's last part has been published."""
        return bool(self._put)

    def put(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Publish one parameter's gradient.

        Raises:
            TypeError: it is sparse.
        """
        if not self._put:
            self._parts.begin(part)
        self._parts.put(part, index, gradient)
        self._put[index] = (gradient, gradient._version)

    def complete(self, part: Node, gradients: Gradients) -> list[int]:
        """Publish what has not been, or is another now.

        Returns:
            The parameters that had been published with something else.

        Raises:
            TypeError: a gradient is sparse.
        """
        put, self._put = self._put, {}
        changed = []
        for index, gradient in enumerate(gradients):
            early = put.get(index)
            if early is not None and gradient is early[0] and gradient._version == early[1]:
                continue
            if early is not None:
                changed.append(index)
            if gradient is not None:
                self._parts.put(part, index, gradient)
            elif early is not None:
                self._parts.remove(part, index)
        return changed


class PartBuckets:
    """Runs of neighbouring parameters, each copied at once when all of it is there. Final.

    Args:
        slots: where each parameter lies in a part.
        num_bytes: how many a bucket has at least, but for the first.

    Attributes:
        is_outdated: whether something has changed since its bucket was given.
    """

    def __init__(self, slots: Sequence[Slot], num_bytes: int) -> None:
        sizes = [slot.end - slot.offset for slot in slots]
        self._indices = list(bucket_ranges(sizes, num_bytes, num_bytes))
        self._spans = [(slots[own[0]].offset, slots[own[-1]].end) for own in self._indices]
        self._of = {index: at for at, own in enumerate(self._indices) for index in own}
        self.begin()

    def begin(self) -> None:
        """Begin a part: nothing of it is there."""
        self._missing = list(map(len, self._indices))
        self._seen: set[int] = set()
        self._unsent = set(range(len(self._spans)))
        self.is_outdated = False

    def mark(self, index: int) -> tuple[int, int] | None:
        """Note that a parameter is there; if it is the last one of its bucket, give its bytes."""
        if index in self._seen:
            self.mark_changed([index])
            return None
        self._seen.add(index)
        bucket = self._of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return None
        self._unsent.discard(bucket)
        return self._spans[bucket]

    def has_given(self, index: int) -> bool:
        """Tell whether a parameter's bucket was given, and maybe is still being copied."""
        return self._of[index] not in self._unsent

    def mark_changed(self, indices: Sequence[int]) -> None:
        """Note that parameters have changed since they were there."""
        changed = {self._of[index] for index in indices}
        self.is_outdated |= not changed <= self._unsent
        self._unsent |= changed

    def indices(self, span: tuple[int, int]) -> range:
        """Give the parameters of the bucket that has these bytes."""
        return self._indices[self._spans.index(span)]

    def rest(self) -> list[tuple[int, int]]:
        """Give the bytes of the buckets that have not been given as they are now."""
        return [self._spans[bucket] for bucket in sorted(self._unsent)]


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

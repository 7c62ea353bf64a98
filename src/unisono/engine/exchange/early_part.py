"""A worker's last part, published one parameter at a time during its backward pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import final

import torch
from typing_extensions import override

from unisono.engine.exchange.arena import Slot
from unisono.engine.exchange.bucket_pipeline import BucketProgress, bucket_ranges
from unisono.engine.exchange.parts import Gradients, Parts
from unisono.plan.summation import Node
from unisono.runtime.workers import meeting_point as futex


@final
class EarlyPart:
    """The gradients that were published early; tells which of them to publish again.

    A hook of the program may change or remove a gradient after it was published. When the whole
    part is published, gradients that are another tensor or version by then are published again.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._put: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether anything of the step's last part has been published."""
        return bool(self._put)

    def put(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Publish one parameter's gradient."""
        if not self._put:
            self._parts.begin(part)
        self._parts.put(part, index, gradient)
        self._put[index] = (gradient, gradient._version)

    def complete(self, part: Node, gradients: Gradients) -> list[int]:
        """Publish gradients that are new or differ; return the indices of those that differ."""
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


@final
class PartBuckets(BucketProgress):
    """Runs of neighbouring parameters, each copied once all its gradients are there.

    Args:
        slots: where each parameter lies in a part.
        num_bytes: the smallest size of a bucket, except for the last one.
    """

    def __init__(self, slots: Sequence[Slot], num_bytes: int) -> None:
        sizes = [slot.end - slot.offset for slot in slots]
        self.indices = list(bucket_ranges(sizes, num_bytes, num_bytes))
        self.spans = [(slots[own[0]].offset, slots[own[-1]].end) for own in self.indices]
        super().__init__(self.indices)

    def is_complete(self, index: int) -> bool:
        """Return whether a parameter's bucket is complete, so that a copy may be under way."""
        return not any(self.missing[number] for number in self._buckets_of[index])

    def rest(self) -> list[tuple[int, int]]:
        """Return the bytes of buckets that are incomplete or have changed."""
        each = enumerate(zip(self.spans, self.missing, strict=True))
        return [span for number, (span, left) in each if left or number in self.changed]


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

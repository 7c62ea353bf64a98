"""A worker's last part, published one parameter at a time while its backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.exchange.arena import Slot
from unisono.exchange.bucket_layout import bucket_ranges
from unisono.exchange.parts import Gradients, Parts
from unisono.plan.summation import Node


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

"""A worker's last part, published one parameter at a time during its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from unisono.engine.exchange.arena import Slot
from unisono.engine.exchange.bucket_pipeline import BucketProgress, bucket_ranges
from unisono.engine.exchange.parts import Gradients, Parts
from unisono.plan.summation import Node


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

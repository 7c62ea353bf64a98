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
class EarlyGradients:
    """What was made of each gradient before its backward pass ended, and whether that still holds.

    A hook of the program, or a second use of the parameter, may change, replace or remove a
    gradient later: it is another tensor then, or another version of the same one.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, index: int, gradient: torch.Tensor, made: torch.Tensor) -> None:
        """Record what was made of a parameter's gradient as it is now."""
        self._noted[index] = gradient, gradient._version, made

    def take(self, gradients: Gradients) -> tuple[dict[int, torch.Tensor], list[int]]:
        """Return what was made of those that are still the same, and which are not; forget all."""
        noted, self._noted = self._noted, {}
        same = {
            index: made
            for index, (gradient, version, made) in noted.items()
            if gradients[index] is gradient and gradient._version == version
        }
        return same, [*(noted.keys() - same.keys())] if len(same) < len(noted) else []


@final
class EarlyPart:
    """The gradients that were published early; tells which of them to publish again."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._put = parts, EarlyGradients()

    @property
    def has_begun(self) -> bool:
        """Whether anything of the step's last part has been published."""
        return bool(self._put)

    def put(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Publish one parameter's gradient."""
        if not self._put:
            self._parts.begin(part)
        self._parts.put(part, index, gradient)
        self._put.note(index, gradient, gradient)

    def publish(self, part: Node, gradients: Gradients) -> list[int]:
        """Publish a whole part; return the indices of gradients that differ from early ones."""
        if not self._put:
            self._parts.publish(part, gradients)
            return []
        same, changed = self._put.take(gradients)
        for index, gradient in enumerate(gradients) if len(same) < len(gradients) else ():
            if gradient is not None and index not in same:
                self._parts.put(part, index, gradient)
            elif gradient is None and index in changed:
                self._parts.remove(part, index)
        return changed

    def forget(self) -> None:
        """Forget what was published, because the run returns to a snapshot."""
        self._put = EarlyGradients()


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

"""From the gradients of a worker's shards to its parts in the arena, in canonical order.

Autograd allocates each gradient (cheaper than zeroing and accumulating in place); finished parts
are copied once, into the slot of their first shard. A parameter that got no gradient from a shard
adds nothing to the sum; a byte per parameter says whether a part has a gradient at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.exchange.arena import Arena
from unisono.plan.summation import Node, additions_after

Gradients = list["torch.Tensor | None"]

COMPLETE, PRESENT, ABSENT = b"\1", 1, 0


class GradientStack:
    """The parts that one worker adds up in a step. Final.

    Args:
        arena: where finished parts go.
        parameters: in the arena's order.
        parts: the worker's parts, from left to right.
    """

    def __init__(
        self, arena: Arena, parameters: Sequence[torch.nn.Parameter], parts: Sequence[Node]
    ) -> None:
        self._arena = arena
        self._parameters = parameters
        self._additions = {
            shard: count
            for part in parts
            for shard, count in zip(range(part.lo, part.hi), additions_after(part), strict=True)
        }
        self._part_ending = {part.hi - 1: part for part in parts}
        self._slots = {part.lo: arena.gradients[part.lo].tensors() for part in parts}
        self._stack: list[Gradients] = []

    def discard(self) -> None:
        """Forget what a step that will not be finished has pushed."""
        self._stack.clear()

    def push_nothing(self, shard: int) -> None:
        """Take an empty shard into account."""
        self._push(shard, [None] * len(self._parameters))

    def push(self, shard: int) -> None:
        """Take the gradients that a backward pass has just left in ``.grad``.

        Raises:
            TypeError: a gradient is sparse.
        """
        gradients: Gradients = []
        for parameter in self._parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        self._push(shard, gradients)

    def _push(self, shard: int, gradients: Gradients) -> None:
        self._stack.append(gradients)
        for _ in range(self._additions[shard]):
            right, left = self._stack.pop(), self._stack.pop()
            self._stack.append(_add(left, right))
        part = self._part_ending.get(shard)
        if part is not None:
            self._publish(part, self._stack.pop())

    def _publish(self, part: Node, gradients: Gradients) -> None:
        slots = self._slots[part.lo]
        present = [g for g in gradients if g is not None]
        if len(present) == len(slots):
            self._arena.write_flags(part.lo, COMPLETE)
        else:
            flags = bytes(ABSENT if g is None else PRESENT for g in gradients)
            self._arena.write_flags(part.lo, b"\0" + flags)
            slots = [slot for slot, g in zip(slots, gradients, strict=True) if g is not None]
        if present:
            with torch.no_grad():
                _copy(slots, present)


def _copy(slots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    for slot, gradient in zip(slots, gradients, strict=True):
        if gradient.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense, but one of shape {tuple(slot.shape)} has layout "
                f"{gradient.layout}: make its layer with `sparse=False`."
            )
    torch._foreach_copy_(slots, gradients)


def _add(left: Gradients, right: Gradients) -> Gradients:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        with torch.no_grad():
            torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]

"""Add the gradients of a worker's shards into its parts, in canonical order.

Autograd allocates each gradient (cheaper than zeroing and accumulating in place). A parameter that
got no gradient from a shard adds nothing to the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from unisono.engine.exchange.early_part import EarlyGradients
from unisono.plan.summation import Node, additions_after
from unisono.runtime.device import by_device

Gradients = list["torch.Tensor | None"]


@final
class GradientStack:
    """The parts that one worker adds up in a step, from left to right.

    `last_shard` ends the last part; None: there are no parts.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], parts: Sequence[Node]) -> None:
        self._parameters = parameters
        self._is_divided = len({parameter.device for parameter in parameters}) > 1
        self._additions = {
            shard: count
            for part in parts
            for shard, count in zip(range(part.lo, part.hi), additions_after(part), strict=True)
        }
        self._part_ending = {part.hi - 1: part for part in parts}
        self.last_shard = parts[-1].hi - 1 if parts else None
        self._stack: list[Gradients] = []
        self._early = EarlyGradients()  # the sums of the last part

    def discard(self) -> None:
        """Discard what an unfinished step has pushed."""
        self._stack.clear()
        self._early = EarlyGradients()

    def add_early(self, index: int, gradient: torch.Tensor) -> tuple[Node, torch.Tensor]:
        """Add up one parameter's part as soon as the backward pass of the last shard has left it.

        Pushed gradients stay unchanged: the parameter may come again with another gradient, and
        :meth:`push` takes the final one. Return the last part, and the parameter's sum over it.
        """
        assert self.last_shard is not None
        count, total = self._additions[self.last_shard], gradient
        with torch.no_grad():
            for gradients in reversed(self._stack[len(self._stack) - count :]):
                left = gradients[index]
                total = total if left is None else left + total
        self._early.note(index, gradient, total)
        return self._part_ending[self.last_shard], total

    def push_nothing(self, shard: int) -> tuple[Node, Gradients] | None:
        """Push an empty shard; see :meth:`push`."""
        return self._push(shard, [None] * len(self._parameters))

    def push(self, shard: int) -> tuple[Node, Gradients] | None:
        """Push the gradients that a backward pass has just left in ``.grad``.

        Return the part that ends with this shard, if one does, and its sums.
        """
        gradients: Gradients = []
        for parameter in self._parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        for pushed in self._stack:
            _check_apart(pushed, gradients)
        if self._early:
            sums, _ = self._early.take(gradients)
            for index, total in sums.items():
                gradients[index] = total
                for pushed in self._stack[len(self._stack) - self._additions[shard] :]:
                    pushed[index] = None
        return self._push(shard, gradients)

    def _push(self, shard: int, gradients: Gradients) -> tuple[Node, Gradients] | None:
        self._stack.append(gradients)
        for _ in range(self._additions[shard]):
            right, left = self._stack.pop(), self._stack.pop()
            self._stack.append(_added(left, right, is_divided=self._is_divided))
        part = self._part_ending.get(shard)
        return None if part is None else (part, self._stack.pop())


def _check_apart(pushed: Gradients, gradients: Gradients) -> None:
    """Raise RuntimeError if a gradient has overwritten that of an earlier shard."""
    for left, right in zip(pushed, gradients, strict=True):
        if left is None or right is None or right.layout != torch.strided:
            continue
        if left.data_ptr() == right.data_ptr() != 0:  # 0: they are empty
            raise RuntimeError(
                f"the gradients of two shards must not share memory, but one of shape "
                f"{tuple(right.shape)} overwrites that of an earlier shard: return a copy "
                f"(`.clone()`) from the hook or the `backward` that reuses its memory."
            )


def _added(left: Gradients, right: Gradients, *, is_divided: bool) -> Gradients:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        lists = [a for a, _ in both], [b for _, b in both]
        with torch.no_grad():
            for into, more in by_device(*lists) if is_divided else (lists,):
                torch._foreach_add_(into, more)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]

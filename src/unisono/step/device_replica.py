"""The model on one of a worker's devices, with what passes over shards need there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.device import Device
from unisono.exchange.buffers import Buffers
from unisono.plan.summation import Node
from unisono.step.crossings import cross
from unisono.step.gradients import Gradients, GradientStack
from unisono.step.placeholders import another_backward


class DeviceReplica:
    """One of a worker's replicas of the model. Final.

    Args:
        device: where it is.
        model: the user's on the first device, a copy of it on the others.
        parameters: those that the optimizer updates, in the exchange's order.
        fixed: those that it does not.
        buffers: the model's.

    Attributes:
        done: the parts that are finished in this step.
    """

    def __init__(
        self,
        device: Device,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        fixed: Sequence[nn.Parameter],
        buffers: Buffers,
    ) -> None:
        self.device, self.model, self.buffers = device, model, buffers
        self.parameters, self.fixed = parameters, fixed
        self._copies = device.copies()
        self.begin([])

    def begin(self, parts: Sequence[Node]) -> None:
        """Start to compute some parts."""
        self._stack = GradientStack(self.parameters, parts)
        self.done: dict[Node, Gradients] = {}

    def start(self, seed: int) -> None:
        """Prepare for one shard's forward pass."""
        self.device.use()
        self.device.seed(seed)
        self.buffers.restore()

    def push(self, shard: int) -> None:
        """Take the gradients that the backward pass of a shard has left."""
        self._note(self._stack.push(shard))
        for parameter in self.fixed:
            parameter.grad = None

    def push_nothing(self, shard: int) -> None:
        """Take into account that a shard has no gradients."""
        self._note(self._stack.push_nothing(shard))

    def clear_gradients(self) -> None:
        """Have the next backward pass allocate every gradient."""
        for parameter in (*self.parameters, *self.fixed):
            parameter.grad = None

    def has_gradients(self) -> bool:
        """Tell whether a backward pass has left gradients."""
        return any(p.grad is not None for p in (*self.parameters, *self.fixed))

    def check_gradients(self) -> None:
        """Refuse gradients that another backward pass than ours has left."""
        if self.has_gradients():
            raise another_backward()

    @property
    def gradient_bytes(self) -> int:
        """What gradients take on this device while a backward pass is under way."""
        one_set = sum(parameter.nbytes for parameter in self.parameters)
        return one_set * (1 + self._stack.depth + len(self.done))

    def brought(self, part: Node, home: Device) -> Gradients:
        """Take the gradients of a finished part, on another device."""
        gradients = self.done.pop(part)
        if home.is_host or home is self.device:
            return gradients
        there = [g for g in gradients if g is not None]
        here = [torch.empty_like(g, device=home.torch) for g in there]
        cross([self._copies], [here], there)
        arrived = iter(here)
        return [None if g is None else next(arrived) for g in gradients]

    def _note(self, finished: tuple[Node, Gradients] | None) -> None:
        if finished is not None:
            part, gradients = finished
            self.done[part] = gradients

"""Hands each chunk its own alias of the module's tensors, and adds its gradients in tree order.

A fork has two halves for each tensor, so that forks make the tree of :mod:`unisono.plan.summation`,
and a backward pass through it makes that tree's additions::

                weight                       on the first device
              ┌───┴────┐
            [0,2)    [2,3)                   a chunk's alias lies on the chunk's device
            ┌─┴─┐      │
    chunk   0   1      2
    device  a   a      b                     g = (g₀ + g₁) + g₂, the first sum on device a

Each sum is made on the device of its first chunk, so what travels are sums of the sub-trees that a
device computes. An alias shares the memory of what it stands for, and its count of changes.

Autograd has a thread a device. A chunk's outputs pass through one gate, so that its backward pass
begins when all their gradients are there: else the order in which gradients meet within the chunk
could depend on which device is faster.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.data_parallel.chunks import mapped, tensors_in
from unisono.plan.summation import Node

Tensors = tuple[torch.Tensor, ...]


def aliases(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[torch.device],
    copies: Mapping[torch.device, Sequence[torch.Tensor]],
) -> list[Tensors]:
    """Give each chunk its alias of each tensor.

    Args:
        tensors: on the first device; all take gradients.
        devices: of each chunk.
        copies: the same tensors on each other device.

    Returns:
        For each chunk one alias a tensor, on the chunk's device.
    """

    if len(devices) == 1:  # so that a call's gradients are added up before those of others
        return [_PASS.apply(*tensors)]
    return _aliases(Node(0, len(devices)), tuple(tensors), devices, copies)


def _aliases(
    node: Node,
    here: Tensors,
    devices: Sequence[torch.device],
    copies: Mapping[torch.device, Sequence[torch.Tensor]],
) -> list[Tensors]:
    if node.hi - node.lo == 1:
        return [here]
    left, right = node.children()
    there = here if devices[left.lo] == devices[right.lo] else copies[devices[right.lo]]
    both: Tensors = _FORK.apply(tuple(tensor.detach() for tensor in there), *here)
    return [
        *_aliases(left, both[: len(here)], devices, copies),
        *_aliases(right, both[len(here) :], devices, copies),
    ]


def through_gate(output: Any) -> Any:
    """Have the gradients of all tensors of a chunk's output come together before they go on."""
    tensors = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        return output
    passed = dict(zip(map(id, tensors), _GATE.apply(*tensors), strict=True))
    return mapped(output, lambda tensor: passed.get(id(tensor), tensor))


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Tensors, *here: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.home = here[0].device
        return (*(tensor.detach() for tensor in here), *there)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        half = len(gradients) // 2
        pairs = zip(gradients[:half], gradients[half:], strict=True)
        return (None, *(_sum(left, right, ctx.home) for left, right in pairs))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


class _Gate(_Pass):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _host_generator().put_back_after_this_pass()
        return gradients


def _sum(
    left: torch.Tensor | None, right: torch.Tensor | None, home: torch.device
) -> torch.Tensor | None:
    """Add what is there, on the device of the fork's tensors."""
    if right is None:
        return left
    right = right.to(home, non_blocking=True)
    if left is None:
        return right
    if left.is_sparse and right.is_sparse:
        return (left.coalesce() + right.coalesce()).coalesce()
    return right + left if left.is_sparse else left + right


_FORK: Any = _Fork  # `apply` has no types
_PASS: Any = _Pass
_GATE: Any = _Gate


class _HostGenerator:
    """Keeps torch's generator of the CPU as it was before a backward pass. Final.

    Activation checkpoints set it, compute their region again, and put it back. Where regions on
    two devices are computed again at once, one would put back what the other has set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: set[int] = set()

    def put_back_after_this_pass(self) -> None:
        number = torch._C._current_graph_task_id()
        with self._lock:
            if number in self._passes:
                return
            self._passes.add(number)
            state = torch.default_generator.get_state()

        def put_back() -> None:
            torch.default_generator.set_state(state)
            self._passes.discard(number)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(put_back)


@functools.cache
def _host_generator() -> _HostGenerator:
    return _HostGenerator()

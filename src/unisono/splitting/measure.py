"""What do the units of a model cost? The bytes of activations are found out on a sample.

The model is called once where it lies, as in training. Gradients, buffers and generators are as
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unisono.device import generators_put_back
from unisono.splitting.units import Unit
from unisono.state.model_buffers import buffers_put_back


class UnitCosts:
    """One call of a model, and what its units take. Final.

    Args:
        model: on whatever devices.
        units: its.
        example: what it is called with: a tuple of arguments, a dict of named ones, or the only
            one.

    Attributes:
        order: the units in the order in which they are computed first; those that are not called
            themselves follow the unit that was registered before them.
        activation_bytes: what the backward pass needs of the calls of each unit, and of what comes
            between it and the next one.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], example: Any) -> None:
        self._calls: list[int] = []  # which unit
        self.activation_bytes = [0] * len(units)
        self._counted: set[int] = {p.untyped_storage().data_ptr() for p in model.parameters()}
        args, kwargs = _arguments(example)
        with (
            _left_as_it_is(model),
            _told_of_calls(units, self._calls),
            torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor),
        ):
            model(*args, **kwargs)
        self.order = self._order_of(len(units))

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._calls and storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.activation_bytes[self._calls[-1]] += storage.nbytes()
        # An output that its own node keeps would keep that node, and so the whole graph, for ever.
        return tensor.detach()

    def _order_of(self, num_units: int) -> list[int]:
        first: dict[int, int] = {}
        for number, at in enumerate(self._calls):
            first.setdefault(at, number)
        ranks, rank = [], -1
        for at in range(num_units):
            rank = first.get(at, rank)
            ranks.append(rank)
        return sorted(range(num_units), key=ranks.__getitem__)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


@contextmanager
def _told_of_calls(units: Sequence[Unit], calls: list[int]) -> Iterator[None]:
    with ExitStack() as stack:
        for at, unit in enumerate(units):
            if unit.module is not None:
                hook = unit.module.register_forward_pre_hook(lambda *_, at=at: calls.append(at))
                stack.callback(hook.remove)
        yield


@contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Leave gradients, buffers and generators of a model's devices as they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with generators_put_back([*devices]), buffers_put_back(model), torch.enable_grad():
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

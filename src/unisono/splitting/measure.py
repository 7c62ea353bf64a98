"""What do the units of a model cost? Found out on a sample: activations in bytes, or time.

The model is called once where it lies, as in training. For times, each call of a unit is then
repeated by itself, forward and backward. Gradients, buffers and generators are as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.device import finish, generators_put_back
from unisono.splitting.units import Unit
from unisono.state.model_buffers import buffers_put_back

_REPEATS = 4  # of which the shortest counts
_Call = tuple[int, tuple[Any, ...], dict[str, Any]]


class UnitCosts:
    """One call of a model, with what its units were called with. Final.

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
        self._model, self._units = model, units
        self._calls: list[_Call] = []
        self.activation_bytes = [0] * len(units)
        self._counted: set[int] = {p.untyped_storage().data_ptr() for p in model.parameters()}
        args, kwargs = _arguments(example)
        with (
            _left_as_it_is(model),
            _told_of_calls(units, self._note),
            torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor),
        ):
            model(*args, **kwargs)
        self.order = self._find_order()

    def times_ns(self, clock: Callable[[], int] = time.perf_counter_ns) -> list[int]:
        """Measure how long all calls of each unit take, in nanoseconds."""
        times = [0] * len(self._units)
        with _left_as_it_is(self._model):
            for at, args, kwargs in self._calls:
                module = self._units[at].module
                assert module is not None
                call = partial(_time_call, module, args, kwargs, clock)
                times[at] += min(call() for _ in range(_REPEATS))
        return times

    def _note(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept = tree_map(_without_graph, (args, kwargs))
        self._calls.append((at, *kept))

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._calls and storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.activation_bytes[self._calls[-1][0]] += storage.nbytes()
        # An output that its own node keeps would keep that node, and so the whole graph, for ever.
        return tensor.detach()

    def _find_order(self) -> list[int]:
        first: dict[int, int] = {}
        for number, (at, _, _) in enumerate(self._calls):
            first.setdefault(at, number)
        ranks, rank = [], -1
        for at in range(len(self._units)):
            rank = first.get(at, rank)
            ranks.append(rank)
        return sorted(range(len(self._units)), key=ranks.__getitem__)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _time_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Callable[[], int]
) -> int:
    # Not leaves, which a layer might change in place.
    args, kwargs = tree_map(
        lambda value: value.clone() if _is_float(value) else value, (args, kwargs)
    )
    _finish(module)
    begun_at_ns = clock()
    leaves = [leaf for leaf in tree_leaves(module(*args, **kwargs)) if _is_float(leaf)]
    outputs = [leaf for leaf in leaves if leaf.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(leaf) for leaf in outputs])
    _finish(module)
    return clock() - begun_at_ns


def _finish(module: nn.Module) -> None:
    """Wait for all that the devices of a module have been given to do."""
    for device in {tensor.device for tensor in (*module.parameters(), *module.buffers())}:
        finish(device)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _without_graph(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextmanager
def _told_of_calls(
    units: Sequence[Unit], note: Callable[[int, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    with ExitStack() as stack:
        for at, unit in enumerate(units):
            if unit.module is not None:
                hook = unit.module.register_forward_pre_hook(
                    lambda _, args, kwargs, at=at: note(at, args, kwargs), with_kwargs=True
                )
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

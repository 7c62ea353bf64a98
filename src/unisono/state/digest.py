"""The digest: a hash of parameters, buffers and optimizer state. Equal digests, equal runs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unisono.device import HOST, in_rows
from unisono.state.contents import named_parameters
from unisono.state.optimizer_state import named_states
from unisono.state.packing import tensors_in


def digest_of(model: nn.Module, optimizer: Optimizer) -> str:
    """Hash every tensor with its name, dtype and shape, in an order that only names decide.

    Returns:
        64 hexadecimal digits (SHA-256).
    """
    return _hash_of(_tensors(model, optimizer))


def digest_of_weights(model: nn.Module) -> str:
    """Hash a model's parameters and buffers likewise; those without a shape yet do not count."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return _hash_of(item for item in named if not is_lazy(item[1]))


def _hash_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        head = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
        total.update(head.encode())
        total.update(in_rows(tensor))
    return total.hexdigest()


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = named_parameters(model, optimizer)
    for name, parameter in parameters.items():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    for name, tensor in _states(optimizer, parameters):
        yield f"optimizer {name}", tensor


def _states(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, state in named_states(optimizer, parameters).items():
        for key, value in state.items():
            if isinstance(value, (torch.Tensor, int, float)):
                yield f"{key} {name}", torch.as_tensor(value, device=HOST)
            else:
                for path, tensor in tensors_in(value, str(key)):
                    yield f"{path} {name}", tensor

"""What an optimizer keeps, by name: tensors, plain values, and the options of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.packing import check_plain


def state_tensors(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """List the tensors of an optimizer's state as ``KEY/PARAMETER``."""
    return {
        f"{key}/{name}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def state_numbers(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """List the rest of an optimizer's state, by parameter and key, as plain JSON.

    Raises:
        CheckpointError: there is something that is no plain value.
    """
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                numbers.setdefault(name, {})[str(key)] = plain(f"the optimizer's `{key}`", value)
    return numbers


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """List the options of an optimizer's groups as plain JSON.

    Raises:
        CheckpointError: there is something that is no plain value.
    """
    return [
        {
            key: plain(f"the optimizer's `{key}`", value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def put_back_state(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give an optimizer the state that :func:`state_tensors`, :func:`state_numbers` have listed."""
    states: dict[str, dict[str, Any]] = {name: dict(numbers.get(name, {})) for name in named}
    for label, tensor in tensors.items():
        key, _, name = label.partition("/")
        if name in states:
            states[name][key] = tensor
    for name, parameter in named.items():
        optimizer.state.pop(parameter, None)
        if states[name]:
            optimizer.state[parameter] = states[name]


def plain(what: str, value: Any) -> Any:
    """Make a value plain JSON; `what` names it.

    Raises:
        CheckpointError: it is not.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(what, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(what, item) for item in value]
    return check_plain(what, value)

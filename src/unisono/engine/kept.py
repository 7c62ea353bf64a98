"""What an optimizer keeps, by name: tensors, plain values, and the options of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.packing import MALFORMED, check_plain, keep_in, labels_in, pack, unpack
from unisono.errors import CheckpointError


def take_state(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Take an optimizer's state apart.

    Returns:
        Its tensors as ``KEY/PARAMETER``, those within lists and dicts as ``KEY/PLACE/PARAMETER``;
        and the rest by parameter and key, as plain JSON that names those.

    Raises:
        CheckpointError: there is something that cannot be kept.
    """
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in named.items()}
    tensors = {
        f"{key}/{name}": value
        for name, state in states.items()
        for key, value in state.items()
        if _is_direct(key, value)
    }
    rest = {name: _take_rest(name, state, tensors) for name, state in states.items()}
    return tensors, {name: packed for name, packed in rest.items() if packed}


def join_state(
    tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Put together, by parameter and key, what :func:`take_state` took apart.

    Raises:
        CheckpointError: it is not of the form that it gives.
    """
    try:
        states = {
            name: {key: unpack(value, tensors) for key, value in state.items()}
            for name, state in rest.items()
        }
        within = {label for state in rest.values() for label in labels_in(dict(state))}
    except MALFORMED as error:
        raise CheckpointError(
            f"the optimizer's state must have the form that this version writes, but has not "
            f"({error!r})."
        ) from None
    for label in tensors.keys() - within:
        key, _, name = label.partition("/")
        # A copy lies where torch would put it; products may depend on that.
        states.setdefault(name, {})[key] = tensors[label].clone()
    return states


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
    states: Mapping[str, dict[str, Any]],
) -> None:
    """Give an optimizer the state that :func:`join_state` has put together, and no other."""
    for name, parameter in named.items():
        optimizer.state.pop(parameter, None)
        if name in states:
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


def _take_rest(
    name: str, state: Mapping[Any, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    for key in state:
        if not isinstance(key, str):
            raise CheckpointError(
                f"an optimizer must name its state by texts to have it kept, but has {key!r:.80}."
            )
    keep = keep_in(tensors, lambda path: f"{path}/{name}")
    return {
        key: pack(value, key, keep, _told)
        for key, value in state.items()
        if not _is_direct(key, value)
    }


def _is_direct(key: Any, value: Any) -> bool:
    """Tell whether a value is a tensor that its key and its parameter are enough to find."""
    return isinstance(value, torch.Tensor) and "/" not in str(key)


def _told(path: str) -> str:
    return f"the optimizer's `{path}`"

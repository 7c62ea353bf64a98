"""What a program wants kept with its run (``run.state``): as JSON and tensors, there and back.

Values are plain JSON, tensors, or objects with ``state_dict`` and ``load_state_dict``: a schedule
of learning rates, an average of weights. Objects stay the same objects; only their state travels.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from unisono.checkpoint.contents import STATE_PREFIX
from unisono.engine.kept import plain
from unisono.errors import CheckpointError

_TENSOR, _ITEMS = "$tensor", "$items"


def pack(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Take the state apart.

    Returns:
        Plain JSON, and the tensors that it names, under names that begin with :data:`STATE_PREFIX`.

    Raises:
        CheckpointError: a value cannot be kept.
    """
    tensors: dict[str, torch.Tensor] = {}
    packed = {}
    for key, value in state.items():
        contents = value.state_dict() if hasattr(value, "state_dict") else value
        packed[str(key)] = _pack(contents, f"{STATE_PREFIX}{key}", tensors)
    return packed, tensors


def unpack(
    packed: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], state: MutableMapping[str, Any]
) -> None:
    """Give `state` the values that :func:`pack` took apart; objects in it load theirs.

    Raises:
        CheckpointError: they are not of the form that :func:`pack` gives; nothing has changed.
    """
    for key, contents in unpacked(packed, tensors).items():
        if hasattr(state.get(key), "load_state_dict"):
            state[key].load_state_dict(contents)
        else:
            state[key] = contents
    for key in [key for key in state if key not in packed]:
        if not hasattr(state[key], "load_state_dict"):
            del state[key]


def unpacked(packed: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Put together what :func:`pack` took apart.

    Raises:
        CheckpointError: it is not of the form that :func:`pack` gives.
    """
    try:
        return {key: _unpack(value, tensors) for key, value in packed.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"`run.state` must have the form that this version writes, but has not ({error!r})."
        ) from None


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        items = [[key, _pack(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {_ITEMS: [[plain(f"`{path}`", key), item] for key, item in items]}
    if isinstance(value, (list, tuple)):
        return [_pack(item, f"{path}/{at}", tensors) for at, item in enumerate(value)]
    return plain(f"`{path.removeprefix(STATE_PREFIX)}` in `run.state`", value)


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]].clone()
        if value.keys() == {_ITEMS}:
            return {key: _unpack(item, tensors) for key, item in value[_ITEMS]}
        return {key: _unpack(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    return value

"""What a program wants kept with its run (``run.state``): to JSON and tensors, and back.

Values are what :mod:`unisono.engine.state.packing` knows, or objects with ``state_dict`` and
``load_state_dict``: a schedule of learning rates, an average of weights. Objects stay the same
objects; only their state travels. So does the extra state of the model's modules.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from unisono.engine.state import packing

STATE_PREFIX = "run.state/"
"""Comes before the names of the program's tensors, which lie among the optimizer's."""


def pack(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Take the state apart.

    Returns:
        Plain JSON, and the tensors that it names, under names that begin with :data:`STATE_PREFIX`.

    Raises:
        CheckpointError: a value cannot be kept.
    """
    tensors: dict[str, torch.Tensor] = {}
    keep = packing.keep_in(tensors, lambda path: STATE_PREFIX + path)
    packed = {}
    for key, value in state.items():
        contents = value.state_dict() if hasattr(value, "state_dict") else value
        packed[str(key)] = packing.pack(contents, str(key), keep, _told)
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
    """Put together what :func:`pack` took apart; raises as :func:`unpack`."""
    return packing.unpack(packed, lambda label: tensors[label].clone(), "`run.state`")


def _told(path: str) -> str:
    return f"`{path}` in `run.state`"


class ExtraState:
    """What a model's modules give in ``get_extra_state``, as an object with a state. Final."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def is_empty(self) -> bool:
        """Whether no module has any."""
        return not self._modules()

    def state_dict(self) -> dict[str, Any]:
        """Ask each module for its extra state."""
        return {name: module.get_extra_state() for name, module in self._modules().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each module its own; those that are not in `state` stay as they are."""
        for name, module in self._modules().items():
            if name in state:
                module.set_extra_state(state[name])

    def _modules(self) -> dict[str, nn.Module]:
        return {
            name: module
            for name, module in self._model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

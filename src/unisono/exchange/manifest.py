"""Which tensor lies where in a snapshot, by the names that a checkpoint's files give them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.exchange.arena import Arena
from unisono.exchange.homes import StateKey
from unisono.exchange.snapshots import describe_extras, described
from unisono.state.contents import named_parameters, updated_parameters
from unisono.state.model_buffers import homes_of_buffers


class Manifest:
    """Describes the tensors of one arena. Final.

    Args:
        model, optimizer: whose names they have.
        arena: where they lie.
        keys: for each parameter that is updated, its state's names and where they lie.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        arena: Arena,
        keys: Sequence[dict[str, StateKey]],
    ) -> None:
        updated = list(updated_parameters(model, optimizer))
        fixed = [name for name in named_parameters(model, optimizer) if name not in updated]
        self._model = [
            *_describe(arena, "parameters", updated),
            *_describe(arena, "fixed", fixed),
            *_describe(arena, "buffers", homes_of_buffers(model)),
        ]
        places = {
            place.at: f"{key}/{name}"
            for name, of_parameter in zip(updated, keys, strict=True)
            for key, place in of_parameter.items()
        }
        states = _describe(arena, "states", [places[at] for at in sorted(places)])
        self._states = [
            [states[place.at] for place in of_parameter.values()] for of_parameter in keys
        ]
        self._known: tuple[bytes, str] = (b"", "")
        self._written = b""

    def files(self, whose: bytes, extras: Mapping[str, torch.Tensor]) -> bytes:
        """Describe the tensors of both files, as ``checkpoint.slots`` has it, in JSON.

        Args:
            whose: which parameters have optimizer state now.
            extras: what is kept beside the arena.
        """
        beside = describe_extras(extras)
        key = (whose, json.dumps(beside))
        if key != self._known or not self._written:
            states = [
                one for has, some in zip(whose, self._states, strict=True) if has for one in some
            ]
            files = {"model.safetensors": self._model, "optimizer.safetensors": states + beside}
            self._known, self._written = key, json.dumps(files).encode()
        return self._written


def _describe(arena: Arena, name: str, names: Iterable[str]) -> list[dict[str, Any]]:
    """Describe the tensors of a region, which have these names."""
    region = arena.region(name)
    return [
        described(name, slot.dtype, slot.shape, slot.stride, region.start + slot.offset, "state")
        for name, slot in zip(names, region.slots, strict=True)
    ]

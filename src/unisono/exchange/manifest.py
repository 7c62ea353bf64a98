"""Which tensor lies where in a snapshot, by the names that a checkpoint's files give them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.exchange.arena import Arena
from unisono.exchange.homes import StateKey
from unisono.exchange.snapshots import describe_extras, describe_tensor
from unisono.state.contents import named_parameters
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
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = named_parameters(model, optimizer)
        updated_names = [name for name, p in named.items() if id(p) in updated]
        fixed_names = [name for name, p in named.items() if id(p) not in updated]
        self._model = [
            describe_tensor(name, slot, arena.offset_in_snapshot(region, slot))
            for region, names in (
                ("parameters", updated_names),
                ("fixed", fixed_names),
                ("buffers", list(homes_of_buffers(model))),
            )
            for name, slot in zip(names, getattr(arena.plan, region), strict=True)
        ]
        self._states = [
            [
                describe_tensor(f"{key}/{name}", slot, arena.offset_in_snapshot("states", slot))
                for key, place in states.items()
                for slot in (arena.plan.states[place.at],)
            ]
            for name, states in zip(updated_names, keys, strict=True)
        ]
        self._known: tuple[bytes, str] = (b"", "")
        self._written = b""

    def tensors(self, whose: bytes, extras: Mapping[str, torch.Tensor]) -> bytes:
        """Describe all tensors, as ``checkpoint.slots`` has it, in JSON.

        Args:
            whose: which parameters have optimizer state now.
            extras: what is kept beside the arena.
        """
        described: list[dict[str, Any]] = describe_extras(extras)
        key = (whose, json.dumps(described))
        if key != self._known or not self._written:
            states = [
                one for has, some in zip(whose, self._states, strict=True) if has for one in some
            ]
            files = {
                "model.safetensors": self._model,
                "optimizer.safetensors": states + described,
            }
            self._known, self._written = key, json.dumps(files).encode()
        return self._written

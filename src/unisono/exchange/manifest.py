"""Describe where each tensor lies in a snapshot, under its name in a checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from unisono.exchange.arena import Arena
from unisono.exchange.homes import StateKeys
from unisono.exchange.snapshots import describe_extras, described


class Manifest:
    """Describes the tensors of one arena. Final.

    Args:
        arena: where they lie.
        keys: of the optimizer's state that lies there.
    """

    def __init__(self, arena: Arena, keys: StateKeys) -> None:
        model = (_describe(arena, name) for name in ("parameters", "fixed", "buffers"))
        self._model = [one for region in model for one in region]
        states = _describe(arena, "states")
        self._states = [[states[key.at] for key in of_one.values()] for of_one in keys]
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


def _describe(arena: Arena, name: str) -> list[dict[str, Any]]:
    region = arena.region(name)
    return [
        described(one.name, one.dtype, one.shape, one.stride, region.start + one.offset, "state")
        for one in region.slots
    ]

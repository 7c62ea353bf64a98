"""Bytes of one worker, on whatever device it computes on, as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from unisono.device import Device
from unisono.workers.memory import Memory


class Bytes(Protocol):
    """Memory that tensors can be laid out in."""

    def tensor(
        self,
        offset: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None,
        /,
    ) -> torch.Tensor:
        """View bytes from `offset` on as a dense tensor (contiguous without `stride`)."""

    def flat(self, offset: int, numel: int, dtype: torch.dtype, /) -> torch.Tensor:
        """View `numel` elements from byte `offset` on as a vector."""


class Block:
    """Bytes on an accelerator. Final.

    Args:
        num_bytes: how many.
        device: where.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None
    ) -> torch.Tensor:
        """See :class:`Bytes`."""
        flat = self.flat(offset, math.prod(shape), dtype)
        return flat.view(*shape) if stride is None else flat.as_strided(shape, stride)

    def flat(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Bytes`."""
        there = self._bytes[offset : offset + numel * dtype.itemsize]
        return there.view(dtype) if numel else torch.empty(0, dtype=dtype, device=there.device)


def private_bytes(num_bytes: int, device: Device) -> Bytes:
    """Take memory of a device that this process shares with nobody."""
    return Memory.private(num_bytes) if device.is_host else Block(num_bytes, device.torch)

"""Bytes of one worker, on whatever device it computes on, as tensors."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

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


class Span(NamedTuple):
    """Bytes from `start` to `stop` that are on one device."""

    start: int
    stop: int
    device: torch.device


class Block:
    """Bytes on accelerators; a tensor lies within one of the spans. Final.

    Args:
        spans: one after the other, each on its device.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._starts = [span.start for span in spans]
        self._blocks = [
            torch.empty(span.stop - span.start, dtype=torch.uint8, device=span.device)
            for span in spans
        ]

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None
    ) -> torch.Tensor:
        """See :class:`Bytes`."""
        flat = self.flat(offset, math.prod(shape), dtype)
        return flat.view(*shape) if stride is None else flat.as_strided(shape, stride)

    def flat(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Bytes`."""
        at = max(bisect_right(self._starts, offset) - 1, 0)
        first = offset - self._starts[at]
        there = self._blocks[at][first : first + numel * dtype.itemsize]
        return there.view(dtype) if numel else torch.empty(0, dtype=dtype, device=there.device)


def within(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Give what of some spans lies between two places."""
    for span in spans:
        first, last = max(span.start, start), min(span.stop, stop)
        if first < last:
            yield Span(first, last, span.device)


def private_bytes(num_bytes: int, device: Device, spans: Sequence[Span] = ()) -> Bytes:
    """Take memory of a device that this process shares with nobody.

    Args:
        spans: on several devices, where which bytes are.
    """
    if device.is_host:
        return Memory.private(num_bytes)
    return Block(spans or [Span(0, num_bytes, device.torch)])

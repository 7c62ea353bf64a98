"""Which of a program's tensors and arrays share memory, so that a change of one changes others?"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple, final

import numpy as np
import torch

from unisono.programs import holders as h

Span = tuple[int, int]
"""Addresses: of the first byte, and after the last one."""


class PartOfMemory(NamedTuple):
    """How a tensor or an array lies in memory that begins before it, in bytes."""

    offset: int
    shape: list[int]
    strides: list[int]
    dtype: str
    is_array: bool


def span_of(value: Any) -> Span | None:
    """Return where a tensor or an array lies; None if it is empty or not in the host's memory."""
    if not value.nbytes or (isinstance(value, torch.Tensor) and value.device.type != "cpu"):
        return None
    ends = [(n - 1) * by for n, by in zip(value.shape, _strides(value), strict=True)]
    first = _address(value)
    last = first + sum(end for end in ends if end > 0) + value.itemsize
    return first + sum(end for end in ends if end < 0), last


def part_of(value: Any, begin: int) -> PartOfMemory:
    """Return how a value lies in memory from `begin` on."""
    shape, is_array = list(value.shape), isinstance(value, np.ndarray)
    dtype = value.dtype.str if is_array else str(value.dtype).removeprefix("torch.")
    return PartOfMemory(_address(value) - begin, shape, _strides(value), dtype, is_array)


def made_in(memory: Any, part: PartOfMemory) -> Any:
    """Return a tensor or an array in the memory of another one, which has no gaps."""
    if isinstance(memory, np.ndarray):
        flat = torch.from_numpy(memory.reshape(-1).view(np.uint8))
    else:
        flat = memory.detach().reshape(-1).view(torch.uint8)
    if part.is_array:
        return np.ndarray(part.shape, part.dtype, flat.numpy().data, part.offset, part.strides)
    dtype: Any = getattr(torch, part.dtype)
    whole = flat[part.offset : flat.numel() - (flat.numel() - part.offset) % dtype.itemsize]
    return whole.view(dtype).as_strided(part.shape, [by // dtype.itemsize for by in part.strides])


def overlapping(spans: Iterable[Span]) -> list[Span]:
    """Return the memory that several of the spans have in common, as far as those reach."""
    found = list[tuple[int, int, int]]()
    for low, high in sorted(spans):
        if found and low < found[-1][1]:
            begin, end, num = found.pop()
            found.append((begin, max(end, high), num + 1))
        else:
            found.append((low, high, 1))
    return [(begin, end) for begin, end, num in found if num > 1]


def copy_of_memory(span: Span) -> np.ndarray:
    """Return a copy of the bytes in a span."""
    begin, end = span
    return np.frombuffer(ctypes.string_at(begin, end - begin), np.uint8).copy()


@final
class KnownMemory:
    """The memory of things without gaps, by what refers to each of them."""

    def __init__(self, things: Iterable[tuple[Any, Any]]) -> None:
        found = [
            (span, reference)
            for reference, thing in things
            if isinstance(thing, h.ARRAYS) and _has_no_gaps(thing) and (span := span_of(thing))
        ]
        self._spans, self._references, end = list[Span](), list[Any](), 0
        for span, reference in sorted(found, key=lambda one: (one[0][0], -one[0][1])):
            if span[1] > end:  # not within an earlier one
                end = span[1]
                self._spans.append(span)
                self._references.append(reference)

    def around(self, span: Span) -> tuple[Any, int] | None:
        """Return a reference to what a span lies in, and where that begins; None if it is apart."""
        at = bisect.bisect(self._spans, span[0], key=lambda one: one[0]) - 1
        if at >= 0 and span[1] <= self._spans[at][1]:
            return self._references[at], self._spans[at][0]
        return None


def _has_no_gaps(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.flags.c_contiguous
    return value.layout is torch.strided and value.is_contiguous()


def _strides(value: Any) -> list[int]:
    if isinstance(value, np.ndarray):
        return [*value.strides]
    return [by * value.itemsize for by in value.stride()]


def _address(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0])
    return int(value.data_ptr())

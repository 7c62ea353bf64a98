"""The memory of a group as one rank sees it: words, bytes and tensors at known positions.

Nothing here decides anything. The mapping is given back when the last tensor that lies in it is
gone, so a tensor may outlive its group.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from unisono.c10d.layout import Layout
from unisono.workers import futex
from unisono.workers.memory import Memory


class GroupMemory:
    """One rank's mapping of the group's memory. Final."""

    def __init__(self, mapping: mmap.mmap, layout: Layout) -> None:
        self.layout = layout
        self.mapping = mapping
        self.memory = Memory(mapping)
        self.words = (ctypes.c_uint32 * (layout.control_bytes // 4)).from_buffer(mapping)
        self.address = ctypes.addressof(self.words)

    def word(self, offset: int) -> int:
        """Read the 32-bit word at `offset`, which lies before the slots."""
        return self.words[offset // 4]

    def set_word(self, offset: int, value: int) -> None:
        """Write the 32-bit word at `offset`, which lies before the slots."""
        self.words[offset // 4] = value

    def add_and_wake(self, offset: int, amount: int = 1) -> None:
        """Add to a word after everything written before, and wake whoever sleeps on it."""
        futex.add_and_wake(self.address + offset, amount)

    def acquire(self, offset: int) -> None:
        """Order later reads after those made; `offset` is of a word that this rank changes."""
        futex.acquire(self.address + offset)

    def wake(self, offset: int) -> None:
        """Wake whoever sleeps on the word at `offset`."""
        futex.wake(self.address + offset)

    def sleep_while(self, offset: int, seen: int, timeout_s: float) -> None:
        """Sleep while the word at `offset` is `seen`, at most `timeout_s` seconds."""
        futex.wait(self.address + offset, seen, timeout_s)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Find where a tensor begins in this memory, or None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < len(self.mapping) else None

    def flat(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """View `numel` elements at `offset` as a vector."""
        return self.memory.flat(offset, numel, dtype)

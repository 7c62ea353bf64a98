"""Shared memory as tensors: one memfd, mapped once in each worker.

Pages are allocated when they are first written, so a generous size costs nothing.

Workers also keep the memory that they free (mallopt(3)), once the first steps of a loop have shown
how much a step needs. By default, glibc returns large blocks to the kernel and gets zeroed pages
for the next ones, which costs a tenth to a third of a step.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import torch


ALIGNMENT_BYTES = 64


def aligned(num_bytes: int) -> int:
    """Round up to whole cache lines (64 bytes), where additions have the same bits everywhere."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def in_pages(num_bytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def give_pages_back(mapping: mmap.mmap, start: int, stop: int) -> None:
    """Release the whole pages within a range; they then read as zero. Source: madvise(2)."""
    first = in_pages(start)
    num_bytes = (stop - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if num_bytes > 0:
        mapping.madvise(mmap.MADV_REMOVE, first, num_bytes)


@final
class Memory:
    """A mapping, initially all zero."""

    _fd: int | None = None

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping

    @classmethod
    def map(cls, fd: int, num_bytes: int) -> Memory:
        """Map the memory behind `fd`, shared with all processes that map it."""
        memory = cls(mmap.mmap(fd, num_bytes))
        memory._fd = os.dup(fd)
        weakref.finalize(memory, os.close, memory._fd).atexit = False
        return memory

    def private_view(self, start: int, num_bytes: int) -> Memory:
        """Map whole pages again; writes through the view stay private."""
        assert self._fd is not None
        flags = mmap.MAP_PRIVATE
        return Memory(mmap.mmap(self._fd, num_bytes, flags=flags, offset=start))

    @classmethod
    def copy_on_write(cls, fd: int, num_bytes: int) -> Memory:
        """Map the memory behind `fd` for reading; writes through the mapping stay private."""
        return cls(mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE))

    @classmethod
    def private(cls, num_bytes: int) -> Memory:
        """Allocate memory that this process shares with no process, not even with its forks."""
        return cls(mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None
    ) -> torch.Tensor:
        """View bytes starting at `offset` as a dense tensor (contiguous without `stride`)."""
        import torch  # not above: a launcher imports this module without torch

        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # A separate storage: saving or copying a tensor's storage must not include the rest.
        flat = torch.frombuffer(self.mapping, dtype=dtype, count=numel, offset=offset)
        return flat.view(*shape) if stride is None else flat.as_strided(shape, stride)

    def flat(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """View `numel` elements starting at byte `offset` as a vector."""
        return self.tensor(offset, (numel,), dtype, None)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """View bytes starting at `offset`; writing to the view writes to the memory."""
        return memoryview(self.mapping)[offset : offset + num_bytes]

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at `offset`."""
        self.mapping[offset : offset + len(data)] = data

    def fill(self, offset: int, data: memoryview) -> None:
        """Write many bytes at `offset`: the kernel allocates missing pages already filled."""
        while data and self._fd is not None:
            num_bytes = os.pwrite(self._fd, data, offset)
            data, offset = data[num_bytes:], offset + num_bytes
        self.mapping[offset : offset + len(data)] = data

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a copy of bytes at `offset`."""
        return self.mapping[offset : offset + num_bytes]


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Make glibc serve large blocks from the heap, and never shrink the heap."""
    give_freed_memory_back()  # once, for blocks freed before
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_freed_memory_back() -> None:
    """Return all free memory of glibc to the kernel, once. Source: malloc_trim(3)."""
    ctypes.CDLL(None).malloc_trim(0)

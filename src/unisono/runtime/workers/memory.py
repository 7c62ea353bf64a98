"""Shared memory as tensors: one memfd, mapped once in each worker.

Pages exist from when they are first written, so a generous size costs nothing.

Workers also keep the memory that they free (mallopt(3)), once a loop's first steps have shown what
a step takes. By default, glibc returns large blocks to the kernel and takes zeroed pages for the
next ones, which costs a tenth to a third of a step.
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


def give_pages_back(mapping: mmap.mmap, start: int, stop: int) -> None:
    """Give the whole pages of a range back; then they read as zero. Source: madvise(2)."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (stop - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if num_bytes > 0:
        mapping.madvise(mmap.MADV_REMOVE, first, num_bytes)


@final
class Memory:
    """A mapping, all zero at first."""

    _fd: int | None = None

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping

    @classmethod
    def map(cls, fd: int, num_bytes: int) -> Memory:
        """Map the memory behind `fd`, shared with all who map it."""
        memory = cls(mmap.mmap(fd, num_bytes))
        memory._fd = os.dup(fd)
        weakref.finalize(memory, os.close, memory._fd).atexit = False
        return memory

    def private_view(self, start: int, num_bytes: int) -> Memory:
        """Map whole pages again; what is written to those through the view stays private."""
        assert self._fd is not None
        flags = mmap.MAP_PRIVATE
        return Memory(mmap.mmap(self._fd, num_bytes, flags=flags, offset=start))

    @classmethod
    def copy_on_write(cls, fd: int, num_bytes: int) -> Memory:
        """Map the memory behind `fd` to be read; what is written here is seen by nobody else."""
        return cls(mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE))

    @classmethod
    def private(cls, num_bytes: int) -> Memory:
        """Take memory that this process shares with nobody, not with a fork of it either."""
        return cls(mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None
    ) -> torch.Tensor:
        """View bytes from `offset` on as a dense tensor (contiguous without `stride`)."""
        import torch  # not above: a launcher, which has this module too, does not wait for it

        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # A storage of its own: what saves or copies a tensor's storage must not take the rest.
        flat = torch.frombuffer(self.mapping, dtype=dtype, count=numel, offset=offset)
        return flat.view(*shape) if stride is None else flat.as_strided(shape, stride)

    def flat(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """View `numel` elements from byte `offset` on as a vector."""
        return self.tensor(offset, (numel,), dtype, None)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """View bytes from `offset` on; writing to the view writes to the memory."""
        return memoryview(self.mapping)[offset : offset + num_bytes]

    def write(self, offset: int, data: bytes) -> None:
        """Put raw bytes at `offset`."""
        self.mapping[offset : offset + len(data)] = data

    def fill(self, offset: int, data: memoryview) -> None:
        """Put many bytes at `offset`: the kernel makes pages that are not there with contents."""
        while data and self._fd is not None:
            num_bytes = os.pwrite(self._fd, data, offset)
            data, offset = data[num_bytes:], offset + num_bytes
        self.mapping[offset : offset + len(data)] = data

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Take raw bytes from `offset`."""
        return self.mapping[offset : offset + num_bytes]


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Tell glibc to serve large blocks from the heap and never to shrink it."""
    give_freed_memory_back()  # once, what came before those
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_freed_memory_back() -> None:
    """Have glibc give what is free now back to the kernel, once. Source: malloc_trim(3)."""
    ctypes.CDLL(None).malloc_trim(0)

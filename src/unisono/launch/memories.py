"""Who owns the memory that workers share? The launcher, so that no worker's death can touch it.

Invariant: the k-th request of every worker gets the same memfd; the launcher lets go of it when
all workers have, or when the job ends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Shared:
    fd: int
    num_bytes: int
    first_rank: int
    released_by: set[int] = field(default_factory=set)


class SharedMemories:
    """The memfds of one job. Final."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._by_index: dict[int, _Shared] = {}

    def request(self, rank: int, index: int, num_bytes: int) -> int:
        """Return the descriptor of memory `index`; it stays the launcher's.

        Raises:
            ValueError: another worker asked for another size, or there is no such memory.
        """
        if index not in self._by_index:
            self._by_index[index] = self._create(rank, num_bytes)
        shared = self._by_index[index]
        if shared.num_bytes != num_bytes:
            raise ValueError(
                f"all workers must share memory of the same size in the same order, but request "
                f"{index} of worker {shared.first_rank} is for {shared.num_bytes} bytes and that "
                f"of worker {rank} for {num_bytes}: build the same model on every worker."
            )
        return shared.fd

    def release(self, rank: int, index: int) -> None:
        """Note that `rank` does not need memory `index` any more."""
        shared = self._by_index[index]
        shared.released_by.add(rank)
        if len(shared.released_by) == self._num_workers and shared.fd >= 0:
            os.close(shared.fd)
            shared.fd = -1

    def close(self) -> None:
        """Let go of everything."""
        for shared in self._by_index.values():
            if shared.fd >= 0:
                os.close(shared.fd)
        self._by_index.clear()

    def _create(self, rank: int, num_bytes: int) -> _Shared:
        if num_bytes < 1:
            raise ValueError(f"shared memory must have at least 1 byte, but has {num_bytes}.")
        fd = os.memfd_create("unisono-memory", os.MFD_CLOEXEC)
        try:
            # Sparse: pages exist from when they are first written.
            os.ftruncate(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise
        return _Shared(fd, num_bytes, rank)

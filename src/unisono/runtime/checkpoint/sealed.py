"""The contents of a file when it was read: bytes in memory that can no longer change.

A mapping of the file would change with it, and kill its readers if the file were truncated. These
bytes are in a sealed memfd (memfd_create(2)), which other workers of the host open as well.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from unisono.runtime.procfs import NotThereError, open_memory

CHUNK_BYTES = 1 << 20  # per read, so that other threads can run in between
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HeldAt = Sequence[Any]
"""Where a process holds bytes: its PID, a descriptor, a name, the size; plain JSON."""


@final
class Sealed:
    """Some bytes in a sealed memfd, which this object owns, with a unique name."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, chunks: Iterable[bytes | memoryview]) -> Sealed:
        """Return some chunks concatenated."""
        name = f"unisono-file-{secrets.token_hex(8)}"
        sealed = cls(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), name)
        with os.fdopen(os.dup(sealed._fd), "wb", buffering=0) as file:
            for chunk in chunks:
                rest = memoryview(chunk).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
        fcntl.fcntl(sealed._fd, fcntl.F_ADD_SEALS, _SEALS)
        return sealed

    @classmethod
    def open(cls, place: HeldAt) -> Sealed | None:
        """Open the bytes of another process on this host; None if that fails."""
        pid, fd, name, num_bytes = place
        try:
            mine = cls(open_memory(pid, fd, name, num_bytes), name)
        except NotThereError:
            return None
        return mine if fcntl.fcntl(mine._fd, fcntl.F_GET_SEALS) == _SEALS else None

    @property
    def place(self) -> HeldAt:
        """Where other processes find the bytes, as long as this object lives."""
        return os.getpid(), self._fd, self._name, len(self)

    @property
    def path(self) -> str:
        """A path under which this process can open the bytes as a file."""
        return f"/proc/self/fd/{self._fd}"

    def __len__(self) -> int:
        return os.fstat(self._fd).st_size

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes in chunks."""
        for start in range(0, len(self), CHUNK_BYTES):
            yield self.read(start, CHUNK_BYTES)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return up to `num_bytes` bytes starting at `start`."""
        return os.pread(self._fd, num_bytes, start)

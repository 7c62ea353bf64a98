"""What a file held when it was read: bytes in memory that nobody can change any more.

A mapping of a file of a directory would change with it, and kill who reads it where it was cut off.
These bytes are a sealed memfd (memfd_create(2)), which other workers of the host open, too.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from unisono.runtime.procfs import NotThereError, open_memory

CHUNK_BYTES = 1 << 20  # at a time, so that other threads get their turn in between
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HeldAt = Sequence[Any]
"""Where a process holds bytes: its number, a descriptor, a name, how many; plain JSON."""


@final
class Sealed:
    """Some bytes in a sealed memfd, which is this object's, of a name that no other has."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, chunks: Iterable[bytes | memoryview]) -> Sealed:
        """Hold some chunks, one behind the other."""
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
        """Open what another process of this host holds; None if that cannot be."""
        pid, fd, name, num_bytes = place
        try:
            mine = cls(open_memory(pid, fd, name, num_bytes), name)
        except NotThereError:
            return None
        return mine if fcntl.fcntl(mine._fd, fcntl.F_GET_SEALS) == _SEALS else None

    @property
    def place(self) -> HeldAt:
        """Where others find it, as long as this object lives."""
        return os.getpid(), self._fd, self._name, len(self)

    @property
    def path(self) -> str:
        """A name under which this process can open it as a file."""
        return f"/proc/self/fd/{self._fd}"

    def __len__(self) -> int:
        return os.fstat(self._fd).st_size

    def __iter__(self) -> Iterator[bytes]:
        """Yield it in chunks."""
        for start in range(0, len(self), CHUNK_BYTES):
            yield self.read(start, CHUNK_BYTES)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Copy some of it, as far as there is some."""
        return os.pread(self._fd, num_bytes, start)

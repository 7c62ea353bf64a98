"""How the ranks of a group come to share one memory: through the store, once.

Rank 0 makes a memfd and writes into the store where it is: its process, the descriptor, and a
random token that the memory begins with. The others open ``/proc/<pid>/fd/<fd>``. Once all have
mapped it, nothing needs the store or the descriptor. No socket, no file with a name, no pickle.

A store may still hold the entry of an earlier group: a file that outlived a crash, or was used
twice. Its process is gone, its descriptor is another file (the token differs), or this rank's line
in its memory is taken. Then the others wait some time for rank 0 of this group to replace it. If
rank 0 cannot make the memory, it writes the reason there.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import Store

from unisono.c10d.group_memory import PID, TOKEN_BYTES, GroupMemory, Layout
from unisono.errors import RendezvousError
from unisono.workers.proc import NotThereError, host_name, open_memory, started_at

_KEY = "unisono"
_MEMORY_NAME = "unisono-c10d"
_FAILED = "failed"
_STALE_AT_MOST_S = 60.0
_LOOK_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """Where the memory of a group is, as the store says it."""

    pid: int
    fd: int
    token: str
    heap_bytes: int
    host: str

    def encode(self) -> str:
        """Write it as one line of words."""
        return f"{self.pid} {self.fd} {self.token} {self.heap_bytes} {self.host}"

    @classmethod
    def decode(cls, text: str) -> MemoryAddress:
        """Read what :meth:`encode` wrote."""
        pid, fd, token, heap_bytes, host = text.split()
        return cls(int(pid), int(fd), token, int(heap_bytes), host)


@contextmanager
def shared_memory(
    store: Store, rank: int, world_size: int, timeout_s: float
) -> Iterator[GroupMemory]:
    """Map the memory of a group. Collective: every rank calls it.

    Others can find it until the block of rank 0 ends.

    Args:
        store: the group's own part of a store.
        rank: this rank in the group.
        world_size: the number of ranks in the group.
        timeout_s: how long rank 0 may take.

    Raises:
        RendezvousError: what the store leads to is not this group's memory.
    """
    if rank == 0:
        memory, fd = _publish(store, Layout.for_this_machine(world_size))
        try:
            yield memory
        finally:
            os.close(fd)
        return
    try:
        store.wait([_KEY], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RendezvousError(
            f"rank 0 must publish the group's memory in the store, but in {timeout_s:.1f} s it "
            f"did not ({error}): look whether rank 0 was started with the same store."
        ) from error
    yield _find(store, rank, world_size, timeout_s)


def _publish(store: Store, layout: Layout) -> tuple[GroupMemory, int]:
    fd = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.num_bytes)
        mapping = _map(fd, layout)
        token = os.urandom(TOKEN_BYTES)
        mapping[:TOKEN_BYTES] = token
        entry = MemoryAddress(os.getpid(), fd, token.hex(), layout.heap_bytes, host_name())
        store.set(_KEY, entry.encode())
    except BaseException as error:
        os.close(fd)
        store.set(_KEY, f"{_FAILED} {os.getpid()} {host_name()} {error}")
        raise
    return GroupMemory(mapping, layout), fd


def _find(store: Store, rank: int, world_size: int, timeout_s: float) -> GroupMemory:
    deadline = time.monotonic() + min(timeout_s, _STALE_AT_MOST_S)
    while True:
        text = store.get(_KEY).decode()
        try:
            if text.startswith(_FAILED):
                _refuse_failed(text)
            return _open(MemoryAddress.decode(text), rank, world_size)
        except NotThereError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank {rank} must map the memory that rank 0 has published in the store, but "
                    f"the entry there cannot be used: {error}. If it is a left-over, remove the "
                    f"file of `file://` or take a fresh store; if rank 0 is late, start it first."
                ) from error
        time.sleep(_LOOK_EVERY_S)


def _refuse_failed(text: str) -> NoReturn:
    """Refuse the entry of a rank 0 that has failed: of this group if its process is there."""
    _, pid, host, why = text.split(" ", 3)
    if host == host_name() and started_at(int(pid)) is not None:
        raise RendezvousError(f"rank 0 must make the group's memory, but failed: {why}")
    raise NotThereError(f"rank 0 of an earlier group failed: {why}")


def _open(entry: MemoryAddress, rank: int, world_size: int) -> GroupMemory:
    if entry.host != host_name():
        raise NotThereError(
            "it was made on another host or in another container, and the backend joins processes "
            "of one host only (take gloo or nccl across hosts)"
        )
    layout = Layout(world_size, entry.heap_bytes)
    fd = open_memory(entry.pid, entry.fd, _MEMORY_NAME, layout.num_bytes)
    path = f"/proc/{entry.pid}/fd/{entry.fd}"
    try:
        if os.pread(fd, TOKEN_BYTES, 0).hex() != entry.token:
            raise NotThereError(f"{path} is the memory of another group")
        if any(os.pread(fd, 4, layout.line(rank) + PID)):
            raise NotThereError(f"a rank {rank} has already come to the memory at {path}")
        return GroupMemory(_map(fd, layout), layout)
    finally:
        os.close(fd)


def _map(fd: int, layout: Layout) -> mmap.mmap:
    try:
        return mmap.mmap(fd, layout.num_bytes)
    except OSError as error:
        raise RendezvousError(
            f"{layout.num_bytes:,} bytes of address space must be free for {layout.world_size} "
            f"ranks (few of them will ever be memory), but mapping them failed with: {error}. "
            f"Raise `ulimit -v`, or destroy groups that are needed no more: each takes as much."
        ) from error

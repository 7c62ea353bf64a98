"""How the ranks of a group come to share one memory: through the store, once.

Rank 0 makes a memfd and writes into the store where it is: its process, the descriptor, and a name
that no other memory has. The others open ``/proc/<pid>/fd/<fd>``. Once all have mapped it, nothing
needs the store or the descriptor. No socket, no file with a name, no pickle.

A store may still hold the entry of an earlier group: a file that outlived a crash, or was used
twice. Its process is gone, its descriptor is another file, or this rank's line in its memory is
taken. Then the others wait some time for rank 0 of this group to replace it. If rank 0 cannot make
the memory, it writes the reason there.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store

from unisono.c10d.group_memory import PID, GroupMemory, Layout
from unisono.errors import RendezvousError
from unisono.workers.proc import (
    NotThereError,
    create_memory,
    host_name,
    open_memory,
    started_at,
    wait_for,
)

_KEY = "unisono"
_NONE = -1  # in the place of a descriptor: rank 0 has failed
_STALE_AT_MOST_S = 60.0


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
    layout = Layout.for_this_machine(world_size)
    if rank == 0:
        memory, fd = _publish(store, layout)
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
    yield _find(store, rank, layout, timeout_s)


def _publish(store: Store, layout: Layout) -> tuple[GroupMemory, int]:
    fd, name = _NONE, f"unisono-c10d-{os.urandom(8).hex()}"
    try:
        fd = create_memory(name, layout.num_bytes)
        memory = GroupMemory(_map(fd, layout), layout)
        store.set(_KEY, json.dumps([host_name(), os.getpid(), fd, name]))
    except BaseException as error:
        if fd != _NONE:
            os.close(fd)
        store.set(_KEY, json.dumps([host_name(), os.getpid(), _NONE, str(error)]))
        raise
    return memory, fd


def _find(store: Store, rank: int, layout: Layout, timeout_s: float) -> GroupMemory:
    def late(error: NotThereError) -> Exception:
        return RendezvousError(
            f"rank {rank} must map the memory that rank 0 has published in the store, but the "
            f"entry there cannot be used: {error}. If it is a left-over, remove the file of "
            f"`file://` or take a fresh store; if rank 0 is late, start it first."
        )

    at_most_s = min(timeout_s, _STALE_AT_MOST_S)
    return wait_for(lambda _: _open(store.get(_KEY), rank, layout), at_most_s, late)


def _open(entry: bytes, rank: int, layout: Layout) -> GroupMemory:
    host, pid, number, name = json.loads(entry)
    if number == _NONE:
        # Of this group if its process is there.
        if host == host_name() and started_at(pid) is not None:
            raise RendezvousError(f"rank 0 must make the group's memory, but failed: {name}")
        raise NotThereError(f"rank 0 of an earlier group failed: {name}")
    if host != host_name():
        raise NotThereError(
            "it was made on another host or in another container, and the backend joins processes "
            "of one host only (take gloo or nccl across hosts)"
        )
    fd = open_memory(pid, number, name, layout.num_bytes)
    try:
        if any(os.pread(fd, 4, layout.line(rank) + PID)):
            raise NotThereError(f"a rank {rank} has already come to that of process {pid}")
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

"""One rank's resources in a group, from the rendezvous to the end.

Rank 0 creates the group's memory, a memfd, and publishes in the store where it is: its PID, the
descriptor, and a unique name. The others open ``/proc/<pid>/fd/<fd>``. Once all have mapped it,
nothing needs the store or the descriptor.

A store may still hold the entry of an earlier group, such as a file that outlived a crash or was
used twice. Then the entry's process is gone, its descriptor is another file, or this rank's line in
its memory is taken. The other ranks wait some time for rank 0 of this group to replace the entry.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Store

from unisono.errors import RendezvousError
from unisono.runtime import procfs
from unisono.runtime.c10d.calls import Vectors, encode
from unisono.runtime.c10d.execution import Call, Execution
from unisono.runtime.c10d.group_memory import PID, GroupMemory, Layout
from unisono.runtime.c10d.meeting import Board, Meeting, Meetings
from unisono.runtime.c10d.messages import Messages

_KEY = "unisono"
_STALE_AT_MOST_S = 60.0
LATE_AT_MOST_S = 10.0


@contextmanager
def shared_memory(
    store: Store, rank: int, world_size: int, timeout_s: float
) -> Iterator[GroupMemory]:
    """Map the memory of a group. Collective: every rank calls it.

    Others can find the memory until the block of rank 0 ends.
    """
    layout = Layout.for_this_machine(world_size)
    if rank:
        yield _find(store, rank, layout, timeout_s)
        return
    name = f"unisono-c10d-{os.urandom(8).hex()}"
    fd = procfs.create_memory(name, layout.num_bytes)
    try:
        memory = GroupMemory(_map(fd, layout), layout)
        store.set(_KEY, json.dumps([procfs.host_name(), os.getpid(), fd, name]))
        yield memory
    finally:
        os.close(fd)


def _find(store: Store, rank: int, layout: Layout, timeout_s: float) -> GroupMemory:
    try:
        store.wait([_KEY], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RendezvousError(
            f"rank 0 must publish the group's memory in the store, but in {timeout_s:.1f} s it "
            f"did not ({error}): look whether rank 0 was started with the same store."
        ) from error

    def late(error: procfs.NotThereError) -> Exception:
        return RendezvousError(
            f"rank {rank} must map the memory that rank 0 has published in the store, but the "
            f"entry there cannot be used: {error}. If it is a left-over, remove the file of "
            f"`file://` or take a fresh store; if rank 0 is late, start it first."
        )

    at_most_s = min(timeout_s, _STALE_AT_MOST_S)
    return procfs.wait_for(lambda _: _open(store.get(_KEY), rank, layout), at_most_s, late)


def _open(entry: bytes, rank: int, layout: Layout) -> GroupMemory:
    host, pid, number, name = json.loads(entry)
    if host != procfs.host_name():
        raise procfs.NotThereError(
            "it was made on another host or in another container, and the backend joins processes "
            "of one host only (take gloo or nccl across hosts)"
        )
    fd = procfs.open_memory(pid, number, name, layout.num_bytes)
    try:
        if any(os.pread(fd, 4, layout.line(rank) + PID)):
            raise procfs.NotThereError(f"a rank {rank} has already come to that of process {pid}")
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


@final
class GroupMember:
    """One rank's resources in a group; `names` are global ranks. Collective."""

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        with shared_memory(store, rank, len(names), timeout_s) as self.region:
            self._meeting = Meeting(self.region, rank, names, timeout_s)
            try:
                self._meeting.announce(encode("init_process_group"))
                self._meeting.arrive()
                self._meeting.wait()
            except BaseException as error:
                self._meeting.give_up(str(error))
                raise
        self.board = Board(self.region, self._meeting)
        self.messages = Messages(self.region, self._meeting)
        self.execution = Execution()

    def run(
        self,
        call: bytes,
        steps: Meetings,
        vectors: Vectors,
        timeout_s: float | None,
        is_async: bool,
    ) -> tuple[Call, ...]:
        """Announce a call and run it; return the call if it has not finished. Collective."""

        def announced() -> Meetings:
            vectors.read()
            self._meeting.announce(call, timeout_s)
            yield from steps
            vectors.write_back()

        made = Call(self._meeting, announced())
        return () if self.execution.carry_out(made, is_async=is_async) else (made,)

    def refuse(self) -> None:
        """Report to the others that this rank's arguments are wrong, without waiting for them."""

        def refusal() -> Meetings:
            self._meeting.refuse()
            yield from ()

        self.execution.carry_out(Call(self._meeting, refusal()), is_async=True)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long waits may last from now on."""
        self._meeting.timeout_s = timeout_s

    def leave(self) -> None:
        """Leave the group after pending calls, and release the memory."""
        if sys.exc_info()[0] is None:  # otherwise the program is failing, and must not wait
            self.execution.finish(LATE_AT_MOST_S)
        self._meeting.leave()
        self._release()

    def abort(self) -> None:
        """Leave the group because this rank has failed; also ends waits of other threads."""
        self._meeting.give_up("the process group was aborted.")
        self._release()

    def _release(self) -> None:
        self.execution.close()
        self.board.close()

"""A data set held in memory, once per host: made by one worker, mapped by the others.

::

    first worker of the host   make() ─ describes it ─ copies it into shared memory ─ frees its own
    others, replacements                 hear of it ─────────────────────────────── map it

The memory has no name anywhere, and belongs to the launcher or to the workers, so nothing is left
over however they end. It is mapped copy-on-write: what a worker changes, it alone sees.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from typing import TypeVar

from unisono.data.arrays_layout import ArraysLayout, unpacked
from unisono.device import generators_put_back
from unisono.workers.allocator import give_freed_memory_back
from unisono.workers.context import context
from unisono.workers.launcher_messages import DATA_KEYS
from unisono.workers.memory import Memory, aligned
from unisono.workers.team import Team

_PURPOSE = "unisono.share"
Value = TypeVar("Value")


def share(make: Callable[[], Value]) -> Value:
    """Hold a data set in memory once per host, not once per worker.

    ::

        train_set = unisono.share(lambda: TensorDataset(*torch.load("train.pt")))

    One worker of each host calls `make`; all get tensors and arrays in the same memory. A
    replacement of a lost worker maps it, too. A worker that changes them in place changes a copy of
    its own. torch's, numpy's and Python's default generators stay where they were. While it is
    being made there are two copies.

    Collective: every rank calls it, in the same order, not between two steps. On one worker it does
    the same.

    Args:
        make: returns tensors on the CPU, numpy arrays, and dicts, lists, tuples, TensorDatasets
            and Subsets of them, with plain numbers and texts. Strides of dense tensors are kept. It
            must return the same on every host.

    Returns:
        The same, in shared memory.

    Raises:
        TypeError: `make` cannot be called, or returns something else.
        RuntimeError: a loop over steps runs.
    """
    if not callable(make):
        raise TypeError(
            f"`make` must be a function that makes the data set, but is {type(make).__name__}: "
            f"pass `lambda: …`, so that only one worker of a host makes it."
        )
    calls = context().join()
    if not calls.is_told:
        raise RuntimeError("`unisono.share` must be called before a loop over steps, not in it.")
    key, fds = DATA_KEYS + calls.index, []

    def make_together() -> bytes:
        fd, sizes = _make_together(calls.team, key, make)
        fds.append(fd)
        return json.dumps(sizes).encode()

    num_bytes, start = json.loads(calls.together(_PURPOSE, make_together))
    # A replacement, which comes later, asks for what the launcher keeps.
    fd = fds.pop() if fds else calls.team.memory_fd(key, num_bytes)
    try:
        memory = Memory.copy_on_write(fd, num_bytes)
    finally:
        os.close(fd)
    described = json.loads(memory.read(0, start).rstrip(b"\0"))
    value: Value = unpacked(described, memory, start)
    return value


def _make_together(team: Team, key: int, make: Callable[[], object]) -> tuple[int, tuple[int, int]]:
    """Have one worker of each host make the value. Collective: every rank calls it.

    Returns:
        The memory's descriptor, which is the caller's; its size, and where contents begin in it.
    """
    while True:
        maker = team.neighbours[0] if len(team.hosts) > 1 else team.membership.leader
        made = _Made(make) if team.world.rank == maker else None
        sizes = b"" if made is None else json.dumps(made.sizes).encode()
        heard = team.gather(sizes, _PURPOSE)
        if maker not in heard:
            continue  # lost while it made it: the next one does
        num_bytes, start = json.loads(heard[maker])
        fd = team.memory_fd(key, num_bytes)
        if made is not None:
            made.write(fd)
            del made
            gc.collect()
            give_freed_memory_back()  # workers keep what they free, for their next step
        if maker in team.gather(b"", _PURPOSE):
            return fd, (num_bytes, start)
        os.close(fd)


class _Made:
    """What `make` has returned, until it is in shared memory. Final."""

    def __init__(self, make: Callable[[], object]) -> None:
        with generators_put_back():
            self._layout = ArraysLayout(make())
        self._head = json.dumps(self._layout.described).encode()
        start = aligned(len(self._head))
        self.sizes = start + max(1, self._layout.num_bytes), start

    def write(self, fd: int) -> None:
        num_bytes, start = self.sizes
        memory = Memory.map(fd, num_bytes)
        memory.write(0, self._head)
        self._layout.write(memory, start)

"""A dataset held in memory once per host: created by one worker, mapped by the others.

::

    first worker of the host   make() ─ describe it ─ copy it into shared memory ─ free the original
    others, replacements                receive that ───────────────────────────── map it

The memory has no name anywhere, and belongs to the launcher or to the workers, so nothing remains
however they end. It is mapped copy-on-write: only the worker that changes it sees the change.

A dataset is pickled without its tensors and arrays (``packed.py``), which follow the pickle. A
tensor that is referenced several times is stored once.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

from unisono.data.packed import has_gaps, is_plain, packed, tensor_apart, unpacked
from unisono.runtime.device import generators_put_back, is_on_host
from unisono.runtime.workers.context import context
from unisono.runtime.workers.launcher_messages import DATA_KEYS, Ready
from unisono.runtime.workers.memory import Memory, aligned, give_freed_memory_back
from unisono.runtime.workers.team import Team

_PURPOSE = "unisono.share"
Value = TypeVar("Value")


def share(make: Callable[[], Value]) -> Value:
    """Store a dataset in memory once per host, not once per worker.

    ::

        train_set = unisono.share(lambda: TensorDataset(*torch.load("train.pt")))

    One worker of each host calls `make`; all get tensors and arrays in the same memory. A
    replacement of a lost worker maps it as well. A worker that changes them in place changes a
    private copy. torch's, numpy's and Python's default generators are not advanced. While `make`
    runs, there are two copies.

    Collective: every rank calls it, in the same order, not between two steps. It works on one
    worker as well.

    Args:
        make: returns anything that can be pickled and contains tensors on the CPU or numpy arrays,
            such as a TensorDataset; only these are shared. Strides of dense tensors are kept. It
            must return the same on every host.

    Returns:
        The value that `make` returned, in shared memory.

    Raises:
        TypeError: `make` cannot be called, or what it returns cannot be shared.
        RuntimeError: a loop over steps runs.
    """
    if not callable(make):
        raise TypeError(
            f"`make` must be a function that creates the dataset, but is {type(make).__name__}: "
            f"pass `lambda: …`, so that only one worker per host creates it."
        )
    context().supervisor.notify(Ready())  # workers killed from now on are replaced
    calls = context().join()
    if not calls.is_recorded:
        raise RuntimeError("`unisono.share` must be called before a loop over steps, not in it.")
    key, fds = DATA_KEYS + calls.index, []

    def make_together() -> bytes:
        fd, sizes = _make_together(calls.team, key, make)
        fds.append(fd)
        return json.dumps(sizes).encode()

    num_bytes, start = json.loads(calls.together(_PURPOSE, make_together))
    # A replacement, which comes later, requests what the launcher keeps.
    fd = fds.pop() if fds else calls.team.memory_fd(key, num_bytes)
    try:
        memory = Memory.copy_on_write(fd, num_bytes)
    finally:
        os.close(fd)
    value: Value = viewed(memory, start)
    return value


def _make_together(team: Team, key: int, make: Callable[[], object]) -> tuple[int, tuple[int, int]]:
    """Create the value on one worker of each host. Collective: every rank calls it.

    Return the memory's descriptor, which the caller owns; its size, and where contents begin.
    """
    while True:
        maker = team.neighbours[0] if len(team.hosts) > 1 else team.membership.leader
        words, sizes = b"", b""
        contents: list[memoryview] = []
        if team.world.rank == maker:
            with generators_put_back():
                words, contents = laid_out(make())
            start = aligned(len(words))
            num_bytes = start + max(1, sum(aligned(each.nbytes) for each in contents))
            sizes = json.dumps([num_bytes, start]).encode()
        heard = team.gather(sizes, _PURPOSE)
        if maker not in heard:
            continue  # lost while it created the value: the next one does
        num_bytes, start = json.loads(heard[maker])
        fd = team.memory_fd(key, num_bytes)
        if words:
            write(Memory.map(fd, num_bytes), start, words, contents)
            contents.clear()
            gc.collect()
            give_freed_memory_back()  # workers keep what they free, for their next step
        if maker in team.gather(b"", _PURPOSE):
            return fd, (num_bytes, start)
        os.close(fd)


def write(memory: Memory, start: int, words: bytes, contents: list[memoryview]) -> None:
    """Write a pickle to memory, and the shared contents from byte `start` on."""
    memory.write(0, words)
    for each in contents:
        memory.fill(start, each)
        start = aligned(start + each.nbytes)


def laid_out(value: Any) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of a value, and its contents to share."""
    try:
        return packed(value, _apart)
    except Exception as error:
        raise TypeError(
            f"`make` must return what can be pickled, and plain dense tensors on the CPU that "
            f"need no gradient, but {error}: return its parts, and build it from what "
            f"`unisono.share` returns."
        ) from error


def _apart(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or not is_on_host(value) or not is_plain(value):
            raise TypeError(
                f"one is a {type(value).__name__} ({value.layout}, {value.device}, "
                f"requires_grad={value.requires_grad})"
            )
        return tensor_apart(value.clone() if has_gaps(value) else value)
    if type(value) is not numpy.ndarray or value.dtype.hasobject or value.dtype.names:
        return NotImplemented
    dense = value if value.flags.writeable else value.copy("K")
    strides = numpy.empty_like(value, subok=False).strides
    content = pickle.PickleBuffer(dense.ravel("K").view("u1").data)
    return numpy.ndarray, (value.shape, value.dtype, content, 0, strides)


def viewed(memory: Memory, start: int) -> Any:
    """Return a value from memory: its pickle is first, its contents start at byte `start`."""
    at = start

    def take(num_bytes: int) -> memoryview:
        nonlocal at
        content, at = memory.view(at, num_bytes), aligned(at + num_bytes)
        return content

    return unpacked(memory.read(0, start), take)

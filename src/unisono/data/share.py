"""A data set held in memory, once per host: made by one worker, mapped by the others.

::

    first worker of the host   make() ─ describes it ─ copies it into shared memory ─ frees its own
    others, replacements                 hear of it ─────────────────────────────── map it

The memory has no name anywhere, and belongs to the launcher or to the workers, so nothing is left
over however they end. It is mapped copy-on-write: what a worker changes, it alone sees.

A data set is pickled without its tensors and arrays (``packed.py``), which lie behind that. One
that is there several times is there once.
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
        make: returns anything that can be pickled and holds tensors on the CPU or numpy arrays,
            such as a TensorDataset; these alone are shared. Strides of dense tensors are kept. It
            must return the same on every host.

    Returns:
        The same, in shared memory.

    Raises:
        TypeError: `make` cannot be called, or what it returns cannot be shared.
        RuntimeError: a loop over steps runs.
    """
    if not callable(make):
        raise TypeError(
            f"`make` must be a function that makes the data set, but is {type(make).__name__}: "
            f"pass `lambda: …`, so that only one worker of a host makes it."
        )
    context().supervisor.tell(Ready())  # a worker that is killed from here on is replaced
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
    value: Value = viewed(memory, start)
    return value


def _make_together(team: Team, key: int, make: Callable[[], object]) -> tuple[int, tuple[int, int]]:
    """Have one worker of each host make the value. Collective: every rank calls it.

    Gives the memory's descriptor, which is the caller's; its size, and where contents begin in it.
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
            continue  # lost while it made it: the next one does
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
    """Put a pickle into memory, and from byte `start` on what is shared."""
    memory.write(0, words)
    for each in contents:
        memory.fill(start, each)
        start = aligned(start + each.nbytes)


def laid_out(value: Any) -> tuple[bytes, list[memoryview]]:
    """Take a value apart: a pickle, and what is to be shared."""
    try:
        return packed(value, _apart)
    except Exception as error:
        raise TypeError(
            f"`make` must return what can be pickled, and plain dense tensors on the CPU that "
            f"need no gradient, but {error}: return what it is made of, and make it of what "
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
    """View a value in memory that has its pickle first, and from byte `start` on what is shared."""
    at = start

    def take(num_bytes: int) -> memoryview:
        nonlocal at
        content, at = memory.view(at, num_bytes), aligned(at + num_bytes)
        return content

    return unpacked(memory.read(0, start), take)

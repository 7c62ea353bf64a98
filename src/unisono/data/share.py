"""A data set held in memory, once per host: made by one worker, mapped by the others.

::

    first worker of the host   make() ─ describes it ─ copies it into shared memory ─ frees its own
    others, replacements                 hear of it ─────────────────────────────── map it

The memory has no name anywhere, and belongs to the launcher or to the workers, so nothing is left
over however they end. It is mapped copy-on-write: what a worker changes, it alone sees.

A data set is pickled without its tensors and arrays, which lie behind that in one block of memory.
A tensor that is there several times is there once.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy
import torch

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
    value: Value = unpacked(memory.read(0, start), memory, start)
    return value


def _make_together(team: Team, key: int, make: Callable[[], object]) -> tuple[int, tuple[int, int]]:
    """Have one worker of each host make the value. Collective: every rank calls it.

    Gives the memory's descriptor, which is the caller's; its size, and where contents begin in it.
    """
    while True:
        maker = team.neighbours[0] if len(team.hosts) > 1 else team.membership.leader
        layout, sizes = None, b""
        if team.world.rank == maker:
            with generators_put_back():
                layout = ArraysLayout(make())
            start = aligned(len(layout.packed))
            sizes = json.dumps([start + max(1, layout.num_bytes), start]).encode()
        heard = team.gather(sizes, _PURPOSE)
        if maker not in heard:
            continue  # lost while it made it: the next one does
        num_bytes, start = json.loads(heard[maker])
        fd = team.memory_fd(key, num_bytes)
        if layout is not None:
            memory = Memory.map(fd, num_bytes)
            memory.write(0, layout.packed)
            layout.write(memory, start)
            del layout, memory
            gc.collect()
            give_freed_memory_back()  # workers keep what they free, for their next step
        if maker in team.gather(b"", _PURPOSE):
            return fd, (num_bytes, start)
        os.close(fd)


class _Place(NamedTuple):
    """Where a tensor or array lies in the block, and how; strides of an array are in bytes."""

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, memory: Memory, start: int) -> Any:
        """View it in a block that begins at byte `start` of a memory."""
        if isinstance(self.dtype, torch.dtype):
            return memory.tensor(start + self.offset, self.shape, self.dtype, self.stride)
        offset = start + self.offset if 0 not in self.shape else 0
        return numpy.ndarray(self.shape, self.dtype, memory.mapping, offset, self.stride)


class ArraysLayout(pickle.Pickler):
    """The places of all tensors and arrays in a value. Final.

    `packed` is the value, pickled with places in the place of contents; `num_bytes` is how large
    the block must be. Raises TypeError for what cannot be pickled or shared.
    """

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        super().__init__(file)
        self.num_bytes = 0
        self._contents: list[tuple[Any, _Place]] = []
        self._known: dict[int, _Place] = {}
        try:
            self.dump(value)
        except Exception as error:
            raise TypeError(
                f"`make` must return what can be pickled, and plain dense tensors on the CPU that "
                f"need no gradient, but {error}: return what it is made of, and make it of what "
                f"`unisono.share` returns."
            ) from error
        self.packed = file.getvalue()

    def write(self, memory: Memory, start: int) -> None:
        """Copy all contents into a block, which begins at byte `start` of a memory."""
        for content, place in self._contents:
            place.view(memory, start)[...] = content

    def persistent_id(self, value: Any) -> _Place | None:
        """See :class:`pickle.Pickler`."""
        is_array = type(value) is numpy.ndarray and not (value.dtype.hasobject or value.dtype.names)
        if not is_array and not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = place = self._next_place(value)
            self._contents.append((value, place))
            self.num_bytes = aligned(self.num_bytes + value.nbytes)
        return self._known[id(value)]

    def _next_place(self, value: Any) -> _Place:
        if isinstance(value, numpy.ndarray):
            strides = numpy.empty_like(value, subok=False).strides
            return _Place(value.dtype, value.shape, strides, self.num_bytes)
        is_dense = value.layout == torch.strided and not value.is_quantized
        is_plain = type(value) is torch.Tensor and is_dense and not value.requires_grad
        if not is_plain or not is_on_host(value):
            raise TypeError(
                f"one is a {type(value).__name__} ({value.layout}, {value.device}, "
                f"requires_grad={value.requires_grad})"
            )
        # The strides that torch gives a copy: no gaps, the order of dimensions kept.
        stride = torch.empty_like(value, device="meta").stride()
        return _Place(value.dtype, tuple(value.shape), stride, self.num_bytes)


class _Unpacker(pickle.Unpickler):
    """Views what lies in a block. Final."""

    def __init__(self, packed: bytes, memory: Memory, start: int) -> None:
        super().__init__(io.BytesIO(packed))
        self._block = memory, start

    def persistent_load(self, place: _Place) -> Any:
        """See :class:`pickle.Unpickler`."""
        return place.view(*self._block)


def unpacked(packed: bytes, memory: Memory, start: int) -> Any:
    """Make a value that :class:`ArraysLayout` has packed, of what is in a block of memory."""
    return _Unpacker(packed, memory, start).load()

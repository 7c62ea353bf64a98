"""A data set held in memory, once per host: made by one worker, mapped by the others.

::

    first worker of the host   make() ─ describes it ─ copies it into shared memory ─ frees its own
    others, replacements                 hear of it ─────────────────────────────── map it

The memory has no name anywhere, and belongs to the launcher or to the workers, so nothing is left
over however they end. It is mapped copy-on-write: what a worker changes, it alone sees.

Where in one block of memory are the tensors and arrays of a data set? As JSON, and back.

::

    {"x": tensor, "y": [array, 3]}  ─►  ["dict", [["x", ["tensor", "float32", shape, stride, 0]],
                                         ["y", ["list", [["array", "<i8", shape, strides, 64],
                                         ["plain", 3]]]]]]

Nothing is pickled. A tensor that is there several times is there once in the block.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

from unisono.runtime.device import generators_put_back, is_on_host
from unisono.runtime.dtypes import dtype_name, dtype_of
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


_PLAIN = (type(None), bool, int, float, str)


class ArraysLayout:
    """The places of everything in a value. Final.

    Args:
        value: tensors, numpy arrays, plain numbers and texts, and dicts, lists, tuples,
            TensorDatasets and Subsets of them.

    Attributes:
        described: the value as JSON, with places in the place of contents.
        num_bytes: how large the block must be.

    Raises:
        TypeError: there is something else in it; the message says where.
    """

    def __init__(self, value: Any) -> None:
        self.num_bytes = 0
        self._contents: list[tuple[Any, list[Any]]] = []
        self._known: dict[int, list[Any]] = {}
        self.described = self._describe(value, "`make()`")

    def write(self, memory: Memory, start: int) -> None:
        """Copy all contents into a block, which begins at byte `start` of a memory."""
        for content, described in self._contents:
            there = unpacked(described, memory, start)
            if isinstance(content, torch.Tensor):
                there.copy_(content)
            else:
                there[...] = content

    def _describe(self, value: Any, where: str) -> list[Any]:
        kind = type(value)
        if kind in _PLAIN:
            return ["plain", value]
        if kind is list and all(type(one) in _PLAIN for one in value):
            return ["plain", value]
        if kind in (list, tuple):
            return [kind.__name__, self._describe_all(value, where)]
        if kind is dict and all(type(key) in (int, str) for key in value):
            items = [[key, self._describe(one, f"{where}[{key!r}]")] for key, one in value.items()]
            return ["dict", items]
        if kind is TensorDataset:
            return ["dataset", self._describe_all(value.tensors, f"{where}.tensors")]
        if kind is Subset:
            indices = [int(index) for index in value.indices]
            return ["subset", self._describe(value.dataset, f"{where}.dataset"), indices]
        if id(value) not in self._known:
            self._known[id(value)] = self._place(value, where)
        return self._known[id(value)]

    def _describe_all(self, values: Sequence[Any], where: str) -> list[Any]:
        return [self._describe(one, f"{where}[{at}]") for at, one in enumerate(values)]

    def _place(self, value: Any, where: str) -> list[Any]:
        if type(value) is numpy.ndarray and not (value.dtype.hasobject or value.dtype.names):
            strides = numpy.empty_like(value, subok=False).strides
            described = ["array", value.dtype.str, [*value.shape], [*strides], self.num_bytes]
        elif type(value) is torch.Tensor and _is_plain(value):
            # The strides that torch gives a copy: no gaps, the order of dimensions kept.
            stride = torch.empty_like(value, device="meta").stride()
            dtype = dtype_name(value.dtype)
            described = ["tensor", dtype, [*value.shape], [*stride], self.num_bytes]
        else:
            raise TypeError(
                f"`make` must return tensors on the CPU, numpy arrays, and dicts, lists, tuples, "
                f"TensorDatasets and Subsets of them, but {where} is {_shown(value)}: return what "
                f"it is made of, and make it of what `unisono.share` returns."
            )
        self.num_bytes = aligned(self.num_bytes + value.nbytes)
        self._contents.append((value, described))
        return described


def unpacked(described: list[Any], memory: Memory, start: int) -> Any:
    """Make a value that :class:`ArraysLayout` has described, of what is in a block of memory."""
    kind, content, *more = described
    if kind == "plain":
        return content
    if kind == "tensor":
        shape, stride, offset = more
        return memory.tensor(start + offset, shape, dtype_of(content), stride)
    if kind == "array":
        shape, strides, offset = more
        place = start + offset if 0 not in shape else 0
        return numpy.ndarray(shape, numpy.dtype(content), memory.mapping, place, strides)
    if kind == "dict":
        return {key: unpacked(one, memory, start) for key, one in content}
    if kind == "subset":
        return Subset(unpacked(content, memory, start), more[0])
    values = [unpacked(one, memory, start) for one in content]
    if kind == "dataset":
        return TensorDataset(*values)
    return tuple(values) if kind == "tuple" else values


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    return is_dense and is_on_host(tensor) and not tensor.requires_grad


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        grad = ", requires_grad=True" if value.requires_grad else ""
        return f"a {type(value).__name__} ({value.layout}, {value.device}{grad})"
    if isinstance(value, dict):
        return f"a {type(value).__name__} with keys that are neither texts nor whole numbers"
    dtype = f" of {value.dtype}" if isinstance(value, numpy.ndarray) else ""
    return f"a {type(value).__name__}{dtype}"

"""Where in one block of memory are the tensors and arrays of a data set? As JSON, and back.

::

    {"x": tensor, "y": [array, 3]}  ─►  ["dict", [["x", ["tensor", "float32", shape, stride, 0]],
                                         ["y", ["list", [["array", "<i8", shape, strides, 64],
                                         ["plain", 3]]]]]]

Nothing is pickled. A tensor that is there several times is there once in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

from unisono.device import is_on_host
from unisono.dtypes import dtype_name, dtype_of
from unisono.workers.memory import Memory, aligned

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

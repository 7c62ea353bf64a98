"""Pickle a value without the bytes of its tensors and arrays, which are copied at most once.

Tensors keep their strides, because torch chooses kernels by them. Elements of expanded tensors are
stored once, and memory between the elements of a slice is left out.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from unisono.runtime.device import HOST, in_rows


class _Packer(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], reduce: Callable[[Any], Any]
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._reduce = reduce

    def reducer_override(self, value: Any) -> Any:
        return self._reduce(value)


def packed(value: Any, reduce: Callable[[Any], Any]) -> tuple[bytes, list[memoryview]]:
    """Return a pickle, and the bytes that are separate from it.

    `reduce` works like :meth:`pickle.Pickler.reducer_override`; see :func:`tensor_apart`.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Packer(file, buffers, reduce).dump(value)
    contents = [buffer.raw() for buffer in buffers]
    return pickle.dumps((file.getvalue(), [each.nbytes for each in contents])), contents


def unpacked(words: bytes | bytearray, take: Callable[[int], Any]) -> Any:
    """Return the value of a pickle; `take` returns the next bytes, which the value keeps."""
    value, sizes = pickle.loads(words)
    return pickle.loads(value, buffers=map(take, sizes))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists only of dtype, shape, strides and bytes."""
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    return is_dense and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def tensor_apart(tensor: torch.Tensor) -> Any:
    """Reduce a plain tensor on the host to its memory layout and its bytes."""
    elements = _elements(tensor)
    how = tensor.dtype, tuple(tensor.shape), tensor.stride(), elements.is_contiguous()
    return _tensor, (*how, pickle.PickleBuffer(in_rows(elements)))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements, repeats aside, are not contiguous in memory."""
    return not _elements(tensor).is_contiguous()


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor in memory order, in which repeated elements appear once."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    shape = [n if step else min(n, 1) for step, n in dims]
    return tensor.as_strided(shape, [step for step, _ in dims])


def _tensor(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], is_whole: bool, data: Any
) -> torch.Tensor:
    if not memoryview(data).nbytes:
        return torch.empty_strided(shape, stride, dtype=dtype, device=HOST)
    flat = torch.frombuffer(data, dtype=dtype)
    if is_whole:
        return flat.as_strided(shape, stride)
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=HOST)
    elements = _elements(tensor)
    elements.copy_(flat.view(elements.shape))
    return tensor

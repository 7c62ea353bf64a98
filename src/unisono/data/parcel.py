"""Send a batch from a loader process to its worker, through a plain pipe.

::

    length │ pickle: the batch, with dtype, shape and strides of each tensor │ bytes of each tensor
    8 bytes

Tensors are read straight into memory that torch has allocated, so they are aligned as usual. They
keep their strides, as torch chooses kernels by them. Expanded tensors are sent once, and what lies
between the elements of a slice is not sent. Unlike shared memory, a pipe cannot be full for good,
and it ends at once when its only writer dies. Only ever read from a process that this one forked.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from typing import Any

import numpy as np
import torch

from unisono.device import HOST, array_of, bytes_of, is_on_host

_LENGTH = struct.Struct("<q")
_ARRAY = "array"
_NUMPYS = {"bool", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def write_parcel(fd: int, content: Any) -> None:
    """Write anything that can be pickled; blocks while nobody reads.

    Raises:
        OSError: nobody will read.
        Exception: whatever pickling raises; nothing is written then.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(content)
    words = file.getbuffer()
    _write(fd, memoryview(_LENGTH.pack(len(words))))
    _write(fd, words)
    for tensor in packer.tensors:
        _write(fd, _bytes_of(tensor))


def read_parcel(fd: int) -> Any:
    """Read what :func:`write_parcel` wrote; blocks until it is all there.

    Raises:
        EOFError: the writer has ended before it was all there.
    """
    length = bytearray(_LENGTH.size)
    _read(fd, memoryview(length))
    words = bytearray(_LENGTH.unpack(length)[0])
    _read(fd, memoryview(words))
    return _Unpacker(io.BytesIO(words), fd).load()


class _Packer(pickle.Pickler):
    """Leaves plain tensors out, in the order in which they come. Final."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        # torch and numpy pickle all others: sparse tensors, subclasses.
        if type(obj) is torch.Tensor and _is_plain(obj):
            return self._leave_out(obj)
        if type(obj) is np.ndarray and _lies_in_its_own_way(obj):
            return _ARRAY, *self._leave_out(torch.from_numpy(obj))
        return None

    def _leave_out(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place < len(self.tensors):
            return (place,)
        self.tensors.append(tensor)
        return tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Unpacker(pickle.Unpickler):
    """Reads the bytes of each tensor when it comes by. Final."""

    def __init__(self, file: io.BytesIO, fd: int) -> None:
        super().__init__(file)
        self._fd = fd
        self._tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _ARRAY:
            return array_of(self.persistent_load(pid[1:]))
        if len(pid) == 1:
            return self._tensors[pid[0]]
        dtype, shape, stride = pid
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=HOST)
        if _has_gaps(tensor):
            without = _without_repeats(tensor)
            elements = torch.empty(without.shape, dtype=dtype, device=HOST)
            _read(self._fd, _bytes_of(elements))
            without.copy_(elements)
        else:
            _read(self._fd, _bytes_of(tensor))
        self._tensors.append(tensor)
        return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and is_on_host(tensor)
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _lies_in_its_own_way(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether numpy would pickle an array in another order than it has."""
    item_bytes = array.dtype.itemsize
    return (
        array.dtype.isnative
        and array.dtype.name in _NUMPYS
        and array.flags.writeable
        and all(step >= 0 and step % item_bytes == 0 for step in array.strides)
        and array.strides != np.empty(array.shape, array.dtype).strides
    )


def _reach(tensor: torch.Tensor) -> int:
    """Count the elements of memory from the first of a tensor to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Tell whether the memory that a tensor reaches is more than its elements, repeated or not."""
    return _reach(tensor) > _without_repeats(tensor).numel()


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """View what an expanded tensor repeats once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided([n if step else min(n, 1) for n, step in steps], tensor.stride())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """View the bytes of what is sent of a tensor: all that it reaches, or its elements."""
    if _has_gaps(tensor):
        flat = _without_repeats(tensor).contiguous().view(-1)
    else:
        flat = tensor.as_strided((_reach(tensor),), (1,))
    return bytes_of(flat)


def _write(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def _read(fd: int, into: memoryview) -> None:
    while len(into):
        num_bytes = os.readv(fd, [into])
        if num_bytes == 0:
            raise EOFError
        into = into[num_bytes:]

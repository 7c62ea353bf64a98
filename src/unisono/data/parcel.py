"""How does a batch get from a loader process to its worker? Through a plain pipe.

::

    length │ pickle: the batch, with dtype and shape in each tensor's place │ bytes of each tensor
    8 bytes

Tensors are read straight into memory of their own, aligned as torch allocates it. There is no
shared memory that could be full, no named socket, and a pipe with one writer says at once, even in
the midst of a batch, that the writer has died. Only ever read from a process that this one forked.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from typing import Any

import torch

_LENGTH = struct.Struct("<q")


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

    def persistent_id(self, obj: Any) -> Any:
        # All others (strided, sparse, of a class of their own) are torch's to pickle.
        if type(obj) is torch.Tensor and _is_plain(obj):
            self.tensors.append(obj)
            return obj.dtype, tuple(obj.shape)
        return None


class _Unpacker(pickle.Unpickler):
    """Reads the bytes of each tensor when it comes by. Final."""

    def __init__(self, file: io.BytesIO, fd: int) -> None:
        super().__init__(file)
        self._fd = fd

    def persistent_load(self, pid: Any) -> torch.Tensor:
        dtype, shape = pid
        tensor = torch.empty(shape, dtype=dtype)
        _read(self._fd, _bytes_of(tensor))
        return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _write(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def _read(fd: int, into: memoryview) -> None:
    while len(into):
        num_bytes = os.readv(fd, [into])
        if num_bytes == 0:
            raise EOFError
        into = into[num_bytes:]

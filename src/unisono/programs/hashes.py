"""Hashes of what programs hold and compute: tensors, arrays, nested structures of them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch.nn.parameter import is_lazy

from unisono.programs.arrays import bits
from unisono.runtime.device import in_rows


def hashed(sample: Any, at_most: int = 64 * 1024) -> str:
    """Return a hash of a sample, from `at_most` evenly spaced bytes of each tensor and array.

    Objects of unknown classes are represented only by their class.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest.update, sample, at_most)
    return digest.hexdigest()


def _add(update: Callable[[bytes], object], value: Any, at_most: int) -> None:
    update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor) and not is_lazy(value):
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.is_quantized:
            _add(update, [value.int_repr(), value.dequantize()], at_most)
        elif value.layout == torch.strided:
            flat = value.detach().reshape(-1)
            update(_told(in_rows(flat[:: _stride(flat.numel() * flat.itemsize, at_most)])))
        elif value.layout == torch.sparse_coo:
            _add(update, [value._indices(), value._values()], at_most)
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            _add(update, [value.crow_indices(), value.col_indices(), value.values()], at_most)
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            _add(update, [value.ccol_indices(), value.row_indices(), value.values()], at_most)
    elif isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        update(f"{array.dtype} {array.shape}".encode())
        if not array.dtype.hasobject:
            update(_told(bits(array.reshape(-1)[:: _stride(array.nbytes, at_most)])))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            update(repr(key).encode())
            _add(update, part, at_most)
    elif isinstance(value, (list, tuple)):
        update(str(len(value)).encode())
        for part in value[:: _stride(8 * len(value), at_most)]:
            _add(update, part, at_most)
    elif isinstance(value, (str, bytes)):
        update(value.encode(errors="replace") if isinstance(value, str) else value)
    elif isinstance(value, (bool, int, float, complex)):
        update(repr(value).encode())


def _told(data: bytes | memoryview) -> bytes:
    """Return a checksum of long data, which would take long to hash."""
    return bytes(data) if len(data) <= 1 << 16 else zlib.crc32(data).to_bytes(4, "little")


def _stride(num_bytes: int, at_most: int) -> int:
    return num_bytes // at_most + 1

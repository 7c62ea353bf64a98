"""A hash of a sample, or of whatever else holds numbers: equal for equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from unisono.device import bytes_of, is_on_host


def hashed(sample: Any, at_most: int = 64 * 1024) -> str:
    """Hash what a sample holds; of objects of unknown classes no more than the class.

    Args:
        at_most: so many bytes of each tensor and array, evenly taken.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest.update, sample, at_most)
    return digest.hexdigest()


def _add(update: Callable[[bytes], object], value: Any, at_most: int) -> None:
    update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.layout == torch.strided and is_on_host(value):
            flat = value.detach().reshape(-1)
            some = flat[:: _stride(flat.numel() * flat.itemsize, at_most)].contiguous()
            update(bytes(bytes_of(some)))
    elif isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        update(f"{array.dtype} {array.shape}".encode())
        if not array.dtype.hasobject:
            update(array.reshape(-1)[:: _stride(array.nbytes, at_most)].tobytes())
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


def _stride(num_bytes: int, at_most: int) -> int:
    return num_bytes // at_most + 1

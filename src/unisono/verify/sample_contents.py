"""Which sample is this? What it contains says so, whatever its index is on that rank.

A dataset may draw random numbers. To compare, each sample is read with the generators set to the
same state, which are put back afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from unisono.device import generators_put_back, in_rows, seed_generators
from unisono.verify.digests import digest_of, plain

SAMPLES_AT_MOST = 4096
SECONDS_AT_MOST = 2.0


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Walk through the tensors and arrays of a nested value, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(tensors_of, value.values()))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(tensors_of, value))


def storages_of(value: Any) -> set[int]:
    """Say where the tensors of a nested value lie; parts of a tensor lie where it does."""
    return {t.untyped_storage().data_ptr() for t in tensors_of(value)} - {0}


def rows_of_tensors(value: Any) -> set[str]:
    """Hash the rows of each tensor by itself."""
    return {row for tensor in tensors_of(value) for row in row_hashes(tensor)}


def row_hashes(value: Any) -> list[str]:
    """Hash each sample of a batch: the rows of all its tensors that are as long as the first."""
    tensors = [plain(tensor) for tensor in tensors_of(value) if tensor.dim()]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    if not tensors:
        return []
    flats = [_bytes_in_rows(tensor) for tensor in tensors]
    return [digest_of(flat[row] for flat in flats) for row in range(len(tensors[0]))]


def _bytes_in_rows(tensor: torch.Tensor) -> list[bytes]:
    data = in_rows(tensor)
    size = len(data) // len(tensor) if len(tensor) else 0
    return [bytes(data[row * size : (row + 1) * size]) for row in range(len(tensor))]


def hash_of_sample(sample: Any) -> str:
    """Hash one sample: its tensors, arrays, numbers and texts."""
    return digest_of(_parts(sample))


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor | np.ndarray):
        for tensor in tensors_of(value):
            yield bytes(in_rows(plain(tensor)))
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_parts, value.values()))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_parts, value))
    elif isinstance(value, str | int | float | bool | bytes):
        yield repr(value).encode()
    elif hasattr(value, "tobytes"):  # an image
        yield value.tobytes()
    else:
        raise TypeError(f"a {type(value).__name__} cannot be compared")


def base_of(dataset: Any) -> tuple[Any, Callable[[int], int]]:
    """Look through ``Subset``: give the dataset behind it, and the index there of an index here."""
    if not isinstance(dataset, Subset):
        return dataset, lambda index: index
    base, inner = base_of(dataset.dataset)
    indices = dataset.indices
    return base, lambda index: inner(int(indices[index]))


def contents_of(dataset: Any) -> dict[int, str]:
    """Hash the samples of a dataset by index; those that can be read within two seconds."""
    found: dict[int, str] = {}
    deadline_s = time.monotonic() + SECONDS_AT_MOST
    # A dataset may do anything; whatever it raises here is not the program's failure.
    with contextlib.suppress(Exception), generators_put_back():
        for index in range(min(len(dataset), SAMPLES_AT_MOST)):
            seed_generators(0)
            found[index] = hash_of_sample(dataset[index])
            if time.monotonic() > deadline_s:
                break
    return found

"""What does a sampler return for an epoch? Indices, batches of them, or keys, in flat memory.

::

    [[4, 0, 4], [7]]   ─►   indices 4 0 4 7,  starts 0 3 4        a batch sampler's
    [("a", 1), …]      ─►   indices of hashes, and which key each stands for

For batches, four bytes per index and eight per batch: two epochs take less than the lists of one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from unisono.runtime.device import array_of


@dataclass(frozen=True, slots=True)
class Taken:
    """The order of an epoch, as a sampler defines it."""

    indices: torch.Tensor  # of shape (samples,), int64, or int32 if large enough
    starts: torch.Tensor  # where batches begin, and the end; int64, (batches + 1,)
    keys: Mapping[int, Any] | None = None  # the keys of indices; None: indices are no hashes
    is_endless: bool = False  # whether there is more


def read_samples(said: Any, at_most: int, at_least: int, argument: str, name: str) -> Taken:
    """Read the result of a sampler: integers or keys, in any container.

    Of an endless one, read `at_most` samples, or `at_least`, if that is more.
    """
    if isinstance(said, (str, bytes)):
        raise _no_samples(said, argument, name)
    if isinstance(said, (list, tuple, range, np.ndarray, torch.Tensor)):
        found, is_endless = said, False
    else:
        found, is_endless = _first(said, max(at_most, at_least), argument, name)
    if not isinstance(found, (np.ndarray, torch.Tensor)) and len(found) and _is_key(found[0]):
        numbers, keys = _numbered(found, argument, name)
        return Taken(_as_tensor(numbers), _ends(len(numbers)), keys, is_endless)
    indices = _as_array(found, argument, name)
    return Taken(torch.from_numpy(indices), _ends(len(indices)), None, is_endless)


def read_batches(said: Any, at_most: int, at_least: int, argument: str, name: str) -> Taken:
    """Read the result of a batch sampler: batches, each of integers or keys.

    Of an endless one, read `at_most` batches, and `at_least` so many samples.
    """
    try:
        batches: Iterator[Any] = iter(said)
    except TypeError:
        raise _no_batches(said, argument, name) from None
    flat, starts, keys = array("i"), array("q", [0]), dict[int, Any]()
    for batch in batches:
        if len(starts) > at_most and len(flat) >= at_least:
            return Taken(_as_tensor(flat), _as_tensor(starts), keys or None, is_endless=True)
        members = batch if type(batch) is list else _members(batch, argument, name)
        if keys or (members and type(members[0]) is not int and _is_key(members[0])):
            if flat and not keys:
                raise _no_batches(batch, argument, name)
            members, more = _numbered(members, argument, name)
            keys |= more
        try:
            flat = _extended(flat, members)
        except (TypeError, OverflowError):
            raise _no_batches(batch, argument, name) from None
        starts.append(len(flat))
    return Taken(_as_tensor(flat), _as_tensor(starts), keys or None)


def _extended(flat: array[int], members: Iterable[int]) -> array[int]:
    """Add numbers, in wider elements if they need them; raise OverflowError if none is enough."""
    num_before = len(flat)
    try:
        flat.extend(members)
        return flat
    except OverflowError:
        if flat.typecode == "q":
            raise
        return _extended(array("q", flat[:num_before]), members)


def _first(said: Any, at_most: int, argument: str, name: str) -> tuple[list[Any], bool]:
    """Return up to `at_most` samples, and whether there are more."""
    try:
        samples = iter(said)
    except TypeError:
        raise _no_samples(said, argument, name) from None
    found = list(islice(samples, at_most))
    return found, len(found) == at_most and next(samples, None) is not None


def _members(batch: Any, argument: str, name: str) -> Any:
    """Return a batch as a sequence of Python's numbers."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        is_row = batch.ndim == 1 and not (
            batch.dtype.is_floating_point
            if isinstance(batch, torch.Tensor)
            else batch.dtype.kind not in "iu"
        )
        if not is_row:
            raise _no_batches(batch, argument, name)
        return batch.tolist()
    if isinstance(batch, (str, bytes)) or not isinstance(batch, Iterable):
        raise _no_batches(batch, argument, name)
    return batch if isinstance(batch, (list, tuple)) else list(batch)


def _as_array(found: Any, argument: str, name: str) -> np.ndarray[Any, Any]:
    try:
        indices = array_of(found) if isinstance(found, torch.Tensor) else np.asarray(found)
    except (TypeError, ValueError):
        indices = np.array(None)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise _no_samples(found, argument, name)
    return indices.astype(np.int64)


def _is_key(sample: Any) -> bool:
    """Return whether a dataset reads a sample by a key instead of a number."""
    return isinstance(sample, (str, bytes, tuple))


def _numbered(samples: Iterable[Any], argument: str, name: str) -> tuple[list[int], dict[int, Any]]:
    """Number keys by their hashes: the same in every process, whatever came before."""
    numbers, keys = [], {}
    for sample in samples:
        if not _is_key(sample):
            raise _no_samples(samples, argument, name)
        told = hashlib.blake2b(repr(sample).encode(), digest_size=8).digest()
        number = int.from_bytes(told, "little") >> 1
        numbers.append(number)
        keys[number] = sample
    return numbers, keys


def _as_tensor(numbers: Any) -> torch.Tensor:
    flat = numbers if isinstance(numbers, array) else array("q", numbers)
    dtype = torch.int64 if flat.typecode == "q" else torch.int32
    return torch.frombuffer(flat, dtype=dtype) if len(flat) else torch.empty(0, dtype=dtype)


def _ends(num_samples: int) -> torch.Tensor:
    return torch.tensor([0, num_samples]) if num_samples else torch.tensor([0])


def _no_samples(said: Any, argument: str, name: str) -> TypeError:
    return TypeError(
        f"{argument} must return integers in one row: a list, a tensor or an array, or keys "
        f"that are strings or tuples, but {name} returns {said!r:.200}."
    )


def _no_batches(said: Any, argument: str, name: str) -> TypeError:
    return TypeError(
        f"{argument} must return batches, each a list of integers or of keys that are strings or "
        f"tuples, but {name} returns {said!r:.200}."
    )

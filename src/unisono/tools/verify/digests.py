"""What is kept of tensors, samples and generators: digests, and sketches of gradients.

A sketch is 64 numbers that preserve linear relations: element ``i`` counts, with a fixed random
sign, towards number ``i mod 64``. So the sketch of a sum is the sum of the sketches, and that of a
difference is about as long as the difference. A vector of up to 64 elements is its own sketch.

A sample is identified by its contents. A dataset may draw random numbers, so each sample is read
for comparison with the generators in the same state.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from unisono.runtime.device import generators_put_back, in_rows, seed_generators
from unisono.tools.verify.trace import Vector

WIDTH = 64
_SAMPLES_AT_MOST, _SECONDS_AT_MOST = 4096, 2.0


@functools.lru_cache(maxsize=256)
def _signs(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(0, 2, (num_rows, WIDTH), generator=generator, dtype=torch.int8) * 2 - 1


@torch.no_grad()
def sketch_of(tensor: torch.Tensor) -> list[float]:
    """Return up to 64 numbers, computed in float64 for any dtype."""
    flat = plain(tensor).reshape(-1)
    if flat.numel() > WIDTH:
        num_rows = -(-flat.numel() // WIDTH)
        padded = torch.nn.functional.pad(flat, (0, num_rows * WIDTH - flat.numel()))
        # Changing a sign is exact in any dtype, so only the sum needs float64.
        flat = (padded.view(num_rows, WIDTH) * _signs(num_rows)).sum(0, dtype=torch.float64)
    return list(flat.to(torch.float64).tolist())


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """Return a hash of bytes in several parts."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    return digest_of([in_rows(plain(tensor))])


def digests_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return hashes of tensors, by name."""
    return {name: digest_of_tensor(tensor) for name, tensor in named}


def bits_to_resume(states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return hashes of what a resumed run must restore besides parameters: by kind and name."""
    optimizer = {
        f"{key} of {name}": digest_of_tensor(value) if torch.is_tensor(value) else repr(value)
        for name, state in states.items()
        for key, value in state.items()
    }
    numpy_state: Any = np.random.get_state()
    generators = {
        "torch": digest_of_tensor(torch.get_rng_state()),
        "numpy": digest_of([numpy_state[1].tobytes(), str(numpy_state[2:]).encode()]),
        "python": digest_of([repr(random.getstate()).encode()]),
    }
    return {"optimizer": optimizer, "generators": generators}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as dense values on the CPU, outside of autograd."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu()


def _leaves(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple):
        yield from itertools.chain.from_iterable(map(_leaves, inner))
    else:
        yield value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors and arrays of a nested value."""
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            yield torch.from_numpy(np.ascontiguousarray(leaf))


def rows_of_tensors(value: Any) -> set[str]:
    """Return hashes of the rows of each tensor separately."""
    return {row for tensor in tensors_of(value) for row in row_hashes(tensor)}


def row_hashes(value: Any) -> list[str]:
    """Return hashes of a batch's samples: the rows of all tensors that are as long as the first."""
    tensors = [plain(tensor) for tensor in tensors_of(value) if tensor.dim()]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    if not tensors:
        return []
    return [digest_of(map(in_rows, rows)) for rows in zip(*tensors, strict=True)]


def hash_of_sample(sample: Any) -> str:
    """Return a hash of one sample: its tensors, arrays, numbers and texts."""
    return digest_of(map(_bytes_of, _leaves(sample)))


def _bytes_of(leaf: Any) -> bytes | memoryview:
    for tensor in tensors_of(leaf):
        return in_rows(plain(tensor))
    if isinstance(leaf, str | int | float | bytes):
        return repr(leaf).encode()
    if hasattr(leaf, "tobytes") and not isinstance(leaf, np.ndarray):  # an image
        data: bytes = leaf.tobytes()
        return data
    raise TypeError(f"a {type(leaf).__name__} cannot be compared")


def base_of(dataset: Any) -> tuple[Any, Callable[[int], int]]:
    """Return the dataset behind any ``Subset``, and a function from indices here to those there."""
    if not isinstance(dataset, Subset):
        return dataset, lambda index: index
    base, inner = base_of(dataset.dataset)
    indices = dataset.indices
    return base, lambda index: inner(int(indices[index]))


def contents_of(dataset: Any) -> list[str]:
    """Return hashes of a dataset's first samples, of those read within two seconds."""
    found: list[str] = []
    deadline_s = time.monotonic() + _SECONDS_AT_MOST
    # A dataset may do anything; an exception here is not the program's failure.
    with contextlib.suppress(Exception), generators_put_back():
        for index in range(min(len(dataset), _SAMPLES_AT_MOST)):
            seed_generators(0)
            found.append(hash_of_sample(dataset[index]))
            if time.monotonic() > deadline_s:
                break
    return found


Array = NDArray[np.float64]
_EPS = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}
_AT_MOST = 0.1


@dataclass(frozen=True, slots=True)
class Relation:
    """``x ≈ factor · y``."""

    factor: float  # that fits best
    rest: float  # the length of the remainder, relative to `x`
    cosine: float  # of the angle between `x` and `y`


def tolerance(dtype: str, size: int, step: int) -> float:
    """Return the relative distance of two gradients of `size` elements that rounding may cause.

    Sums in another order differ by about ``eps · √size``; the constants leave room for several
    layers. The effect of rounding on parameters accumulates from step to step.
    """
    eps = _EPS.get(dtype, _EPS["bfloat16"])
    return float(min(_AT_MOST, eps * (256 + 16 * size**0.5) * (1 + 4 * step)))


def relation(x: Array, y: Array) -> Relation:
    """Return the relation of two vectors."""
    length_x, length_y = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    if length_x == 0 or length_y == 0:
        return Relation(1.0 if length_x == length_y else 0.0, float(length_x != length_y), 0.0)
    factor = float(x @ y) / length_y**2
    cosine = float(x @ y) / (length_x * length_y)
    return Relation(factor, distance(x, factor * y) / length_x, cosine)


def weights(x: Array, columns: Sequence[Array]) -> tuple[Array, float]:
    """Express a vector as a weighted sum of others: return weights, and the relative remainder."""
    matrix = np.stack(columns, axis=1)
    found = np.linalg.lstsq(matrix, x, rcond=1e-9)[0].astype(np.float64)
    length = float(np.linalg.norm(x))
    return found, distance(x, matrix @ found) / length if length else 0.0


def joined(vectors: Iterable[Vector]) -> Array:
    """Return the sketches of all parameters as one vector."""
    return np.array([number for vector in vectors for number in vector], dtype=np.float64)


def distance(x: Array, y: Array) -> float:
    """Return the distance between two vectors."""
    return float(np.linalg.norm(x - y))

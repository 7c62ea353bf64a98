"""What is kept of tensors and generators: digests, and sketches of gradients.

A sketch is 64 numbers from which linear relations can be read: element ``i`` counts, with a fixed
random sign, towards number ``i mod 64``. So the sketch of a sum is the sum of the sketches, and
that of a difference is about as long as the difference. Vectors of up to 64 elements are their own.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from unisono.device import in_rows

WIDTH = 64
_DIGITS = 10


@functools.lru_cache(maxsize=256)
def _signs(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(0, 2, (num_rows, WIDTH), generator=generator, dtype=torch.int8) * 2 - 1


@torch.no_grad()
def sketch_of(tensor: torch.Tensor) -> list[float]:
    """Return up to 64 numbers, in float64, whatever the tensor's dtype."""
    flat = plain(tensor).to(torch.float64).reshape(-1)
    if flat.numel() > WIDTH:
        num_rows = -(-flat.numel() // WIDTH)
        padded = torch.nn.functional.pad(flat, (0, num_rows * WIDTH - flat.numel()))
        flat = (padded.view(num_rows, WIDTH) * _signs(num_rows)).sum(0)
    return [float(f"{value:.{_DIGITS}g}") for value in flat.tolist()]


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """Hash bytes, in several parts."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Hash the bytes of a tensor."""
    return digest_of([in_rows(plain(tensor))])


def digests_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Hash tensors by name."""
    return {name: digest_of_tensor(tensor) for name, tensor in named}


def bits_to_resume(states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Hash what a resumed run must have again beside parameters: by kind, then by name.

    Args:
        states: of the optimizer, by parameter.
    """
    optimizer = {
        f"{key} of {name}": digest_of_tensor(value) if torch.is_tensor(value) else repr(value)
        for name, state in states.items()
        for key, value in state.items()
    }
    return {"optimizer": optimizer, "generators": generator_digests()}


def generator_digests() -> dict[str, str]:
    """Hash the states of the generators that a dataset may draw from."""
    numpy_state: Any = np.random.get_state()
    return {
        "torch": digest_of_tensor(torch.get_rng_state()),
        "numpy": digest_of([numpy_state[1].tobytes(), str(numpy_state[2:]).encode()]),
        "python": digest_of([repr(random.getstate()).encode()]),
    }


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as dense values on the CPU, outside of autograd."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu()

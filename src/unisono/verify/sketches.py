"""What is kept of a gradient: its digest, and 64 numbers from which linear relations can be read.

Element ``i`` counts, with a fixed random sign, towards number ``i mod 64``. So the sketch of a sum
is the sum of the sketches, and the sketch of a difference is about as long as the difference.
Vectors of up to 64 elements are their own sketch.
"""

from __future__ import annotations

import functools
import hashlib

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


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Hash the bytes of a tensor."""
    return digest_of(in_rows(plain(tensor)))


def digest_of(data: bytes | memoryview) -> str:
    """Hash bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as dense values on the CPU, outside of autograd."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu()

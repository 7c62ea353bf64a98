"""Do two devices compute the same bits? A hash of what this one makes of a few fixed numbers.

Products of several sizes in each precision, convolutions, normalization, attention and random
draws, forward and backward. Other processors, libraries or drivers nearly always differ in some of
it; equal hashes are a sign that devices agree, and no proof.

What goes in is the same everywhere: uniform numbers of the CPU's generator, which rounds none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from unisono.device import in_rows

_SEED = 20
_HASH_BYTES = 8
# Rows, inner size and columns: a square, one with odd edges, and one with so long an inner size
# that a GPU divides the sum over it among its processors.
_PRODUCTS = ((64, 64, 64), (33, 129, 65), (8, 4096, 8))
# What a GPU draws depends on how many threads it runs at once, where that are fewer than numbers.
_NUM_DRAWS, _KEPT_OF_DRAWS = 2**21, 509


def fingerprint(
    device: torch.device, dtypes: Sequence[torch.dtype], num_draws: int = _NUM_DRAWS
) -> str:
    """Hash what a device computes with the settings of now; its default generator is drawn from.

    Args:
        device: which one.
        dtypes: in which it computes.
        num_draws: how many random numbers are drawn at once.

    Returns:
        16 hexadecimal digits.
    """
    source = torch.Generator().manual_seed(_SEED)
    with torch.enable_grad():
        computed = [each for dtype in dtypes for each in _passes(device, dtype, source)]
    computed += _draws(device, num_draws)
    flat = torch.cat([each.detach().reshape(-1).view(torch.uint8) for each in computed])
    return hashlib.blake2b(in_rows(flat), digest_size=_HASH_BYTES).hexdigest()


def _passes(
    device: torch.device, dtype: torch.dtype, source: torch.Generator
) -> Iterator[torch.Tensor]:
    """Compute layers of networks, and their gradients."""

    def numbers(*shape: int) -> torch.Tensor:
        drawn = torch.rand(shape, generator=source) - 0.5
        return drawn.to(dtype).to(device).requires_grad_()

    for rows, inner, columns in _PRODUCTS:
        left, right = numbers(rows, inner), numbers(inner, columns)
        yield from _with_gradients(left @ right, left, right)
    images, filters = numbers(4, 8, 15, 15), numbers(16, 8, 3, 3)
    convolved = F.conv2d(images, filters, padding=1)
    normed = F.batch_norm(convolved, None, None, training=True)
    yield from _with_gradients(F.max_pool2d(F.gelu(normed), 2), images, filters)
    queries, keys, values = (numbers(2, 2, 33, 32) for _ in range(3))
    seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    yield from _with_gradients(seen, queries, keys, values)
    words, places = numbers(50, 96), torch.arange(128, device=device) * 7 % 50
    hidden = F.layer_norm(F.embedding(places, words), (96,))
    yield from _with_gradients(F.cross_entropy(hidden, places), words)


def _with_gradients(result: torch.Tensor, *given: torch.Tensor) -> Iterator[torch.Tensor]:
    yield result
    yield from torch.autograd.grad(result, given, result.detach())


def _draws(device: torch.device, num_draws: int) -> Iterator[torch.Tensor]:
    """Draw random numbers in the ways that layers do."""
    for drawn in (
        torch.rand(num_draws, device=device),
        torch.randn(num_draws, device=device),
        F.dropout(torch.ones(num_draws, device=device), 0.3),
        torch.bernoulli(torch.full((num_draws,), 0.3, device=device)),
    ):
        yield drawn[::_KEPT_OF_DRAWS].contiguous()
    yield torch.randperm(1000, device=device)

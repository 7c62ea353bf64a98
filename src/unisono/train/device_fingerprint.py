"""Do two devices compute the same bits? A hash of what this one makes of a few fixed numbers.

Products of several sizes, convolutions, normalization, attention and random draws, forward and
backward, in each precision. Other processors, libraries or drivers nearly always differ in some of
it; equal hashes are a sign that devices agree, and no proof. On the CPU, where what is drawn and
the form of attention depend on nothing else, the products and layers alone take some milliseconds.

What goes in is the same everywhere: uniform numbers of the CPU's generator, which rounds none.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from unisono.device import HOST, Device, in_rows, num_threads
from unisono.train.determinism import deterministic_kernels
from unisono.train.tf32 import tf32_switched
from unisono.world import threads_per_worker

_SEED = 20
_HASH_BYTES = 8
# Rows, inner size and columns: one with odd edges, and one with so long an inner size that a GPU
# divides the sum over it among its processors.
_PRODUCTS = ((33, 129, 65), (8, 1024, 8))
_LARGE_PRODUCTS = ((256, 256, 256), (16, 8192, 16))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What a GPU draws depends on how many threads it runs at once, where that are fewer than numbers.
_NUM_DRAWS, _KEPT_OF_DRAWS = 2**21, 509


def fingerprint_of(device: Device) -> str:
    """Hash what a worker's device computes, once in a process.

    Returns:
        16 hexadecimal digits; nothing where it could not be found out.
    """
    if device.is_divided:  # as of one, where they are alike
        return " ".join(dict.fromkeys(map(fingerprint_of, device.parts)))
    known = _known()
    if device.name not in known:
        known[device.name] = _fingerprint(device)
    return known[device.name]


@functools.cache
def _known() -> dict[str, str]:
    return {}


def _fingerprint(device: Device) -> str:
    source = torch.Generator().manual_seed(_SEED)
    try:
        with (
            device.generators_put_back(),
            num_threads(threads_per_worker()),
            deterministic_kernels(not device.is_host),
            tf32_switched(None if device.is_host else False),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.torch.type, enabled=False),
        ):
            computed = list(_computed(device, source))
            flat = torch.cat([each.detach().reshape(-1).view(torch.uint8) for each in computed])
        return hashlib.blake2b(in_rows(flat), digest_size=_HASH_BYTES).hexdigest()
    except (RuntimeError, TypeError, ValueError):  # no memory, or a mode of the program's
        return ""


def _computed(device: Device, source: torch.Generator) -> Iterator[torch.Tensor]:
    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        drawn = torch.rand(shape, generator=source, dtype=torch.float32, device=HOST) - 0.5
        return drawn.to(dtype).to(device.torch).requires_grad_()

    yield from _layers(numbers, _PRODUCTS)
    if device.is_host:
        return
    for dtype in _DTYPES:
        there = functools.partial(numbers, dtype=dtype)
        yield from _layers(there, _LARGE_PRODUCTS)
        yield from _attention(there)
    device.seed(_SEED)
    yield from _draws(device.torch)


def _layers(
    numbers: Callable[..., torch.Tensor], products: Sequence[tuple[int, int, int]]
) -> Iterator[torch.Tensor]:
    """Compute what networks consist of, and gradients."""
    for rows, inner, columns in products:
        left, right = numbers(rows, inner), numbers(inner, columns)
        yield from _with_gradients(left @ right, left, right)
    images, filters = numbers(2, 8, 9, 9), numbers(16, 8, 3, 3)
    convolved = F.conv2d(images, filters, padding=1)
    normed = F.gelu(F.batch_norm(convolved, None, None, training=True))
    yield from _with_gradients(normed, images, filters)
    hidden = numbers(20, 96)
    yield from _with_gradients(F.log_softmax(F.layer_norm(hidden, (96,)), 1), hidden)


def _attention(numbers: Callable[..., torch.Tensor]) -> Iterator[torch.Tensor]:
    queries, keys, values = (numbers(2, 2, 33, 32) for _ in range(3))
    seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    yield from _with_gradients(seen, queries, keys, values)


def _with_gradients(result: torch.Tensor, *given: torch.Tensor) -> Iterator[torch.Tensor]:
    yield result
    yield from torch.autograd.grad(result, given, result.detach())


def _draws(device: torch.device) -> Iterator[torch.Tensor]:
    """Draw random numbers in the ways that layers do."""
    ones = torch.ones(_NUM_DRAWS, dtype=torch.float32, device=device)
    for drawn in (
        torch.rand_like(ones),
        torch.randn_like(ones),
        F.dropout(ones, 0.3),
        torch.bernoulli(ones * 0.3),
    ):
        yield drawn[::_KEPT_OF_DRAWS].contiguous()
    yield torch.randperm(1000, device=device)

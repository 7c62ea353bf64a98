"""The device that a worker computes on: the only file that asks for a type of device.

Generators, threads, autocast, the gradient scaler, pinned memory, raw bytes of tensors, and what of
the device fixes the bits of a run. Everything else on the way of a batch is the same on all
devices; ``tests/test_architecture.py`` sees to that.
"""

from __future__ import annotations

import functools
import platform
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import pin_memory

from unisono.seeding import seed_python_and_numpy

HOST = "cpu"
"""Where tensors lie in the memory of the host."""
# torch begins a process, and `fresh_seed` a job, with 64 bits at random; people choose fewer, or a
# negative number, which torch takes for one just below 2⁶⁴.
_CHOSEN_BELOW, _CHOSEN_FROM = 2**53, 2**64 - 2**32


def is_computed_on(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is where workers compute."""
    return tensor.device.type == HOST


def facts() -> str:
    """Say what of the device fixes the bits of a run, in words."""
    return torch.backends.cpu.get_cpu_capability() + " " + platform.machine()


def seed_generators(seed: int) -> None:
    """Seed every default generator of this process (Python's, numpy's, torch's) from 64 bits."""
    torch.default_generator.manual_seed(seed)
    seed_python_and_numpy(seed)


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Leave every default generator as it was, whatever happens inside."""
    numpy = sys.modules.get("numpy")
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def drawn_without_seed() -> bool:
    """Tell whether torch's default generator was drawn from and begins elsewhere in each start.

    It begins where the system's randomness says, until a program seeds it. One in 2,000 such seeds
    is taken for a program's.
    """
    seed = torch.default_generator.initial_seed()
    if not _CHOSEN_BELOW <= seed < _CHOSEN_FROM:
        return False
    untouched = torch.Generator().manual_seed(seed).get_state()
    return not torch.equal(torch.default_generator.get_state(), untouched)


@functools.cache
def notices() -> set[str]:
    """Give what this process has been told once about its generators."""
    return set()


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Compute with `threads` threads inside the block; their number is part of a run's identity."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Compute in `dtype` what torch knows to be safe in it, inside the block."""
    return torch.autocast(HOST, dtype)


def grad_scaler() -> torch.amp.GradScaler:
    """Make torch's gradient scaler."""
    return torch.amp.GradScaler(HOST)


def can_pin() -> bool:
    """Tell whether there is a device that batches in pinned memory are copied to faster."""
    return torch.cuda.is_available()


def pin(batch: Any) -> Any:
    """Have every tensor of a batch in pinned memory, as torch's DataLoader does."""
    return pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Give the elements of a tensor as an array, which shares its memory where it can."""
    return tensor.detach().cpu().numpy()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """View the elements of a dense tensor as bytes, in the order in which they lie in memory.

    Writing to the view writes to the tensor.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def in_rows(tensor: torch.Tensor) -> memoryview:
    """Give the elements of a tensor as bytes, row by row."""
    return bytes_of(tensor.detach().cpu().contiguous())

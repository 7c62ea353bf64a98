"""The process's random generators: seeded for a place in the run, and put back afterwards.

Python's, numpy's (where it is loaded) and torch's default generators are the ones that models
and losses draw from.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.seeding import seed_python_and_numpy

# torch begins a process, and `fresh_seed` a job, with 64 bits at random; people choose fewer, or a
# negative number, which torch takes for one just below 2⁶⁴.
_CHOSEN_BELOW, _CHOSEN_FROM = 2**53, 2**64 - 2**32


def seed_generators(seed: int) -> None:
    """Seed every default generator of this process from 64 bits."""
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

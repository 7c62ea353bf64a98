"""The process's random generators: seeded for a place in the run, and put back afterwards.

Python's, numpy's (where it is loaded) and torch's default generators are the ones that models
and losses draw from.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.seeding import seed_python_and_numpy


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

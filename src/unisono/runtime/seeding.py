"""The default generators of Python and numpy, seeded from 64 bits; torch's are left to the caller.

One process draws on one device, another on all of its own, so torch's are not the same everywhere.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def seed_python_and_numpy(seed: int) -> None:
    """Seed Python's default generator, and numpy's where it is loaded.

    numpy gets the low 32 bits, as torch's generator of the CPU does by itself: two words take it 13
    microseconds more, and :func:`unisono.plan.seeds.seed_of` has these differ.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def python_put_back() -> Iterator[None]:
    """Leave Python's default generator as it was, whatever is imported inside."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def fresh_seed() -> int:
    """Choose 64 bits at random, which nobody takes for a seed that a program has chosen."""
    return 2**63 | int.from_bytes(os.urandom(7), "little")

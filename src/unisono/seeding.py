"""The default generators of Python and numpy, seeded from 64 bits; torch's are left to the caller.

One process draws on one device, another on all of its own, so torch's are not the same everywhere.
"""

from __future__ import annotations

import random
import sys


def seed_python_and_numpy(seed: int) -> None:
    """Seed Python's default generator, and numpy's where it is loaded."""
    random.seed(seed)
    if "numpy" in sys.modules:
        # In two words: of 32 bits alone, two among 77,000 samples would be alike.
        sys.modules["numpy"].random.seed(divmod(seed, 2**32))

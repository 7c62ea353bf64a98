"""Where do random numbers start in a worker? Where the caller's would go on, the same everywhere.

A function that is launched computes what it would compute when called: it starts from the
caller's generator states. A script, or a library that the caller had not loaded, has no state to
go on from; all workers of the job then start from one fresh seed.
"""

from __future__ import annotations

import sys
from typing import Any


def caller_states() -> dict[str, Any]:
    """Take the states of those generators that are loaded here; loads none."""
    states: dict[str, Any] = {}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "get_rng_state"):
        states["torch"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


def start_generators(states: dict[str, Any], seed: int) -> None:
    """Set every generator to its state in `states`, or from `seed` where there is none."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))

"""Python's and numpy's generators begin where a seed says, whichever part of the package asks."""

import random

import numpy as np
import pytest
import torch

from unisono.distributed import process_group
from unisono.runtime.device import generators_put_back, seed_generators

SEED = 2**40 + 7


@pytest.mark.parametrize("seed_all", [seed_generators, process_group._seed_generators])
def test_every_default_generator_is_seeded(seed_all):
    with generators_put_back():
        seed_all(SEED)
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        seed_all(SEED + 1)
        others = random.random(), np.random.rand(), torch.rand(()).item()
        seed_all(SEED)
        assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn
    assert all(one != other for one, other in zip(drawn, others, strict=True))

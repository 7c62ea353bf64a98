"""torch's switches for deterministic kernels are set for a time, and put back."""

import contextlib

import pytest
import torch

from unisono.training.computing import deterministic_kernels

CUDNN, MEMORY = torch.backends.cudnn, torch.utils.deterministic


def switches():
    return {
        "mode": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "compiled": torch._inductor.config.deterministic,
        "fills": MEMORY.fill_uninitialized_memory,
        "tries": CUDNN.benchmark,
        "repeats": CUDNN.deterministic,
    }


EXACT = {
    "mode": True,
    "warn only": False,
    "compiled": True,
    "fills": False,
    "tries": False,
    "repeats": True,
}


@pytest.fixture(autouse=True)
def switches_put_back():
    before = switches()
    yield
    torch.use_deterministic_algorithms(before["mode"], warn_only=before["warn only"])
    torch._inductor.config.deterministic = before["compiled"]
    MEMORY.fill_uninitialized_memory = before["fills"]
    CUDNN.benchmark, CUDNN.deterministic = before["tries"], before["repeats"]


PROGRAMS = {
    "nothing": lambda: None,
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "warn only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "compiled alone": lambda: setattr(torch._inductor.config, "deterministic", True),
    "unfilled": lambda: setattr(MEMORY, "fill_uninitialized_memory", False),
    "benchmark": lambda: setattr(CUDNN, "benchmark", True),
    "deterministic cuDNN": lambda: setattr(CUDNN, "deterministic", True),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_switches_are_set_and_put_back_whatever_a_program_has_set(program):
    PROGRAMS[program]()
    before = switches()
    with contextlib.suppress(KeyError), deterministic_kernels(True):
        assert switches() == EXACT
        raise KeyError
    assert switches() == before


def test_one_block_within_another_leaves_the_outer_one_as_it_is():
    with deterministic_kernels(True):
        with deterministic_kernels(True):
            assert switches() == EXACT
        assert switches() == EXACT

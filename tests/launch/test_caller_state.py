"""A worker computes in the modes that the caller has set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import unisono
from unisono.runtime.device import flushes_denormals
from unisono.runtime.launch.call import caller_modes, set_modes


@pytest.fixture(autouse=True)
def modes_are_put_back() -> Iterator[None]:
    before = caller_modes()
    yield
    # What users call, and set_modes, would load the compiler here, which takes seconds.
    torch.set_deterministic_debug_mode(before["get_deterministic_debug_mode"])
    set_modes(before)


def seen():
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "onednn": torch.backends.mkldnn.enabled,
        "flushes": flushes_denormals(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


@pytest.mark.slow
def test_workers_have_the_callers_modes():
    before = seen()
    assert unisono.launch(seen, workers=1) == [before]
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_deterministic_debug_mode("warn")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.backends.mkldnn.enabled = False
    torch.set_flush_denormal(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.mha.set_fastpath_enabled(False)
    assert unisono.launch(seen, workers=2) == [seen()] * 2
    assert {name for name, value in seen().items() if value != before[name]} == (set(before))
    torch.set_deterministic_debug_mode("error")
    assert unisono.launch(seen, workers=1) == [seen()]


def precisions():
    backends = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


@pytest.mark.slow
def test_precisions_that_are_set_by_their_new_names_travel_too():
    before = precisions()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert unisono.launch(precisions, workers=1) == [(before[0], "bf16")]
    set_modes(caller_modes())  # which the old names can no longer tell

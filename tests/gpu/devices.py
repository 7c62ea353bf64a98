"""The devices that tests run on, workers that share one, and settings that repeat a plain loop."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from tests.accelerator import sim

import unisono

CUDA, CPU, SIM = "cuda", "cpu", "sim"


@functools.cache
def why_not(device: str) -> str | None:
    """Say why tests cannot run on a device."""
    if device == CUDA and not torch.cuda.is_available():
        return "torch sees no GPU on this machine; `make test-gpu` is for one that has one"
    if device == SIM:
        return sim.why_not()
    return None


def be_ready(device: str) -> None:
    """Have a device known to torch in this process, a worker's too."""
    if device == SIM:
        sim.install()


@contextmanager
def deterministic() -> Iterator[None]:
    """Compute as a person would who wants the same bits twice, and put the settings back."""
    was_on = torch.are_deterministic_algorithms_enabled()
    is_only_told = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=is_only_told)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = benchmark


def settings() -> tuple[object, ...]:
    """Read all of torch's switches that a run may turn, to compare them before and after."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        _read(lambda: torch.backends.cudnn.allow_tf32),
        _read(torch.get_float32_matmul_precision),
    )


def _read(switch: Callable[[], object]) -> object:
    """Read one of torch's old switches, which raise where the new ones say something else."""
    try:
        return switch()
    except RuntimeError:
        return "differs from the new switches"


def launch(function: Callable[..., Any], *args: Any, workers: int, device: str, **more: Any) -> Any:
    """Call a function on workers that share a device; returns what each of them said."""
    if device == CUDA:
        return unisono.launch(function, *args, workers=workers, workers_per_gpu=workers, **more)
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        return unisono.launch(function, *args, workers=workers, **more)

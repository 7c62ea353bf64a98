"""What is said of torch and of GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from unisono.runtime.launch.placement import DriverGpu
from unisono.tools.doctor.torch_checks import (
    TorchFailedError,
    facts_in_child,
    judge_gpus,
    judge_torch,
    torch_and_gpus,
)

GIB = 2**30
CPU = {"version": "2.13.0+cpu", "built_for": "CPUs alone"}
CUDA = {"version": "2.11.0+cu128", "built_for": "CUDA 12.8"}
H200 = DriverGpu("GPU-1", "H200", 141 * GIB)


@pytest.mark.parametrize(
    ("facts", "num_gpus", "verdict", "words"),
    [
        (CPU, 0, "ok", "torch 2.13.0+cpu, built for CPUs alone."),
        (CPU, 2, "wrong", "cannot use this machine's 2 GPUs. Install a torch for CUDA"),
        (CUDA, 2, "ok", "built for CUDA 12.8"),
        ({**CPU, "version": "2.9.1"}, 0, "wrong", "is too old. Install torch 2.11"),
    ],
)
def test_a_torch_is_judged(facts: Any, num_gpus: int, verdict: str, words: str) -> None:
    one = judge_torch(facts, num_gpus)
    assert (one.verdict, words in f"{one.evidence} {one.remedy}") == (verdict, True), one


@pytest.mark.parametrize(
    ("facts", "known", "expected"),
    [
        (CPU, [], [("ok", "No GPU: NVIDIA's driver knows of none here. Workers compute on the")]),
        (CUDA, [H200], [("ok", "0: H200 with 141 GiB.")]),
        ({**CUDA, "gpu_trouble": "too old"}, [H200], [("wrong", "says: too old")]),
        (
            {**CUDA, "without_kernels": ["H200"]},
            [H200],
            [("ok", "0: H200"), ("wrong", "torch has no kernels for H200.")],
        ),
        (
            CUDA,
            [H200, H200._replace(memory_used=100 * GIB)],
            [("ok", "1: H200"), ("warning", "100 GiB of GPU 1's 141 GiB are taken.")],
        ),
    ],
)
def test_gpus_are_judged(facts: Any, known: Any, expected: list[tuple[str, str]]) -> None:
    found = list(judge_gpus(facts, known))
    assert [one.verdict for one in found] == [verdict for verdict, _ in expected], found
    for one, (_, words) in zip(found, expected, strict=True):
        assert words in one.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch", "timeout_s", "words"),
    [
        ("raise OSError('libtorch_cpu.so: bad ELF')", 60, "OSError: libtorch_cpu.so: bad ELF"),
        ("import os; os.kill(os.getpid(), 11)", 60, "exit status -11"),
        ("import time; time.sleep(100)", 1, "no answer within 1 s"),
    ],
)
def test_a_torch_that_cannot_be_loaded_is_wrong(
    tmp_path: Path, torch: str, timeout_s: float, words: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(TorchFailedError, match=words):
        facts_in_child(environ, timeout_s)
    if timeout_s > 1:
        first, second = torch_and_gpus(environ, [])
        assert (first.check, first.verdict, second.check) == ("torch", "wrong", "gpus")
        assert f"torch cannot be loaded: {words}" in first.evidence

"""What tests on a GPU share: the device, and what comes to the sitting's file.

Each test with the fixture ``device`` is marked ``gpu`` and runs on CUDA; where torch sees none, it
is skipped and says so. ``UNISONO_TEST_DEVICE=cpu make test-gpu`` runs them on the CPU instead,
smaller: that shows that they run, and what holds on every device. Those marked ``on_the_cpu_too``
do so in ``make test``.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tests.accelerator import sim
from tests.gpu.devices import CPU, CUDA, SIM, why_not

DEVICE_VARIABLE = "UNISONO_TEST_DEVICE"
FINDINGS_VARIABLE = "UNISONO_GPU_FINDINGS"
SETTLE_S = 10.0
WORDS_AT_MOST = 4000


def pytest_configure() -> None:
    if os.environ.get(DEVICE_VARIABLE, CUDA) == CUDA and why_not(CUDA) is None:
        # Plain loops that are to repeat themselves need it, before anything has used CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if os.environ.get(DEVICE_VARIABLE) == "sim" and sim.why_not() is None:
        sim.install()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its device, with the reason where there is none."""
    if "device" not in metafunc.fixturenames:
        return
    chosen = os.environ.get(DEVICE_VARIABLE, CUDA)
    reason = why_not(chosen)
    for name, others in (("needs_cuda", (CPU, SIM)), ("needs_accelerator", (CPU,))):
        if metafunc.definition.get_closest_marker(name) and chosen in others:
            reason = f"nothing of what it looks at is there on {chosen}"
    marks = [pytest.mark.gpu, *([pytest.mark.skip(reason=reason)] if reason else [])]
    rows = [pytest.param(chosen, marks=marks)]
    if chosen == CUDA and metafunc.definition.get_closest_marker("on_the_cpu_too"):
        rows.append(pytest.param("cpu", marks=pytest.mark.slow))
    metafunc.parametrize("device", rows)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """See that workers have ended; in the place of the fixture for tests that run alone.

    CUDA and NCCL keep files in shared memory, and other files' tests run at the same time.
    """
    before = dict(os.environ)
    yield
    deadline_s = time.monotonic() + SETTLE_S
    while (left := list(_workers())) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not left, f"left behind: {left}"
    changed = {name for name, value in os.environ.items() if before.get(name) != value}
    ours = sorted(name for name in changed if name.startswith(_OF_LAUNCHERS))
    assert not ours, f"the environment was changed: {ours}"


# What a launcher sets; libraries for GPUs and compilers set variables of their own.
_OF_LAUNCHERS = (
    *("UNISONO_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_", "MKL_"),
    *("CUDA_VISIBLE_DEVICES", "GLOO_", "NCCL_SOCKET", "TP_SOCKET"),
)


def _workers() -> Iterator[psutil.Process]:
    """Find the workers below this process; a server that is kept has torch loaded, and idles."""
    for child in psutil.Process().children():
        try:
            if "unisono.runtime.launch.forkserver" in " ".join(child.cmdline()):
                yield from child.children()
        except psutil.NoSuchProcess:
            continue


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down what a test came to."""
    is_skipped_before = report.when == "setup" and report.skipped
    if report.when == "call" or report.failed or is_skipped_before:
        _append(
            {
                "name": report.nodeid,
                "outcome": report.outcome,
                "when": report.when,
                "seconds": report.duration,
                "message": _message(report)[-WORDS_AT_MOST:],
            }
        )


def _message(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return report.longreprtext


@functools.cache
def _findings() -> int | None:
    path = os.environ.get(FINDINGS_VARIABLE)
    return None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _append(found: dict[str, Any]) -> None:
    """Append a line at once: other files' tests write to the same file."""
    file = _findings()
    if file is not None:
        os.write(file, json.dumps(found, default=str).encode() + b"\n")

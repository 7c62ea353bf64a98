"""What NVIDIA's driver knows, by a driver of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from unisono.runtime.launch import gpus as nvml
from unisono.runtime.launch import placement
from unisono.runtime.launch.gpus import DriverGpu, gpus_of_driver
from unisono.runtime.launch.placement import Machine


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """Put functions in the place of NVIDIA's, which fail as they are told."""

    def build(*failing: str, forbidden: int = 99) -> None:
        begun = []

        def answer(name: str, found: Any) -> None:
            def told(*given: Any) -> Any:
                if name in failing or (name == "HandleByIndex" and given == (forbidden,)):
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
                assert begun or name == "Init"
                return found(*given)

            prefix = "nvml" if name in ("Init", "Shutdown") else "nvmlDeviceGet"
            monkeypatch.setattr(pynvml, f"{prefix}{name}", told)

        answer("Init", lambda: begun.append(True))
        answer("Shutdown", begun.clear)
        answer("Count", lambda: 3)
        answer("HandleByIndex", lambda index: index)
        answer("UUID", lambda gpu: f"GPU-{gpu}")
        answer("Name", lambda gpu: "H200")
        answer("MemoryInfo", lambda gpu: SimpleNamespace(total=10, used=gpu))
        monkeypatch.setattr(nvml, "_LIBRARY", None)  # CDLL(None) is this program

    return build


def test_gpus_are_those_of_the_driver(driver) -> None:
    driver()
    gpus = tuple(DriverGpu(f"GPU-{at}", "H200", 10, at) for at in range(3))
    assert [gpus_of_driver(), gpus_of_driver()] == [gpus, gpus]


def test_a_gpu_that_this_user_may_not_have_is_left_out(driver) -> None:
    driver(forbidden=1)
    assert [gpu.uuid for gpu in gpus_of_driver()] == ["GPU-0", "GPU-2"]


def test_a_gpu_of_which_nothing_is_told_is_there(driver) -> None:
    driver("UUID", "Name", "MemoryInfo")
    assert gpus_of_driver() == (DriverGpu("", "a GPU"),) * 3


@pytest.mark.parametrize("failing", ["Init", "Count"])
def test_a_driver_that_fails_has_no_gpus(driver, failing: str) -> None:
    driver(failing)
    assert gpus_of_driver() == ()


def test_without_the_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libnvidia-ml-of-nobody.so.1")
    assert gpus_of_driver() == ()
    assert Machine.here().gpus == ()


def test_a_machine_is_what_the_driver_says(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setattr(placement, "num_devices", lambda: 5)
    assert Machine.here() == Machine(5, ("GPU-0", "GPU-1", "GPU-2"))

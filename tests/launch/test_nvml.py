"""What NVIDIA's driver knows, by a library in its place."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from unisono.launch import nvml, placement
from unisono.launch.nvml import gpus_of_driver
from unisono.launch.placement import Machine

# As documented in the NVML API reference: 0 is success, 4 no permission, 9 no driver.
LIBRARY = """
#include <stdio.h>
static int begun = 0;
static int places[8] = {0, 1, 2, 3, 4, 5, 6, 7};
int nvmlInit_v2(void) { begun++; return INIT; }
int nvmlShutdown(void) { begun--; return begun; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return COUNT; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index == FORBIDDEN) return 4;
    *handle = &places[index];
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    if (!begun) return 1;
    snprintf(text, length, "GPU-%d%d%d", *(int *)handle, *(int *)handle, (int)length);
    return UUID;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a library in the place of NVIDIA's, which answers as it is told."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def build(init: int = 0, count: int = 0, forbidden: int = 99, uuid: int = 0) -> None:
        answers = {"INIT": init, "COUNT": count, "FORBIDDEN": forbidden, "UUID": uuid}
        library = tmp_path / f"nvml-{init}-{count}-{forbidden}-{uuid}.so"
        defined = [f"-D{name}={value}" for name, value in answers.items()]
        command = [compiler, "-shared", "-fPIC", "-x", "c", *defined, "-o", str(library), "-"]
        subprocess.run(command, input=LIBRARY, text=True, check=True)
        monkeypatch.setattr(nvml, "_LIBRARY", str(library))

    return build


def test_gpus_are_those_of_the_driver(driver) -> None:
    driver()
    assert gpus_of_driver() == ("GPU-0096", "GPU-1196", "GPU-2296")
    assert gpus_of_driver() == ("GPU-0096", "GPU-1196", "GPU-2296")


def test_a_gpu_that_this_user_may_not_have_is_left_out(driver) -> None:
    driver(forbidden=1)
    assert gpus_of_driver() == ("GPU-0096", "GPU-2296")


def test_a_gpu_whose_name_is_not_told_is_there(driver) -> None:
    driver(uuid=3)
    assert gpus_of_driver() == ("", "", "")


@pytest.mark.parametrize("failure", [{"init": 9}, {"count": 999}])
def test_a_driver_that_fails_has_no_gpus(driver, failure: dict[str, int]) -> None:
    driver(**failure)
    assert gpus_of_driver() == ()


def test_without_the_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libnvidia-ml-of-nobody.so.1")
    assert gpus_of_driver() == ()
    assert Machine.here().gpus == ()


def test_a_machine_is_what_the_driver_and_torch_say(
    driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver()
    monkeypatch.setattr(placement, "num_devices", lambda: 5)
    for version in ("", "2.13.0+cpu"):
        monkeypatch.setattr(placement, "torch_for_cpus_alone", lambda v=version: v)
        assert Machine.here() == Machine(5, ("GPU-0096", "GPU-1196", "GPU-2296"), version)

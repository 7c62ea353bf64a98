"""Which GPUs workers see: what the environment shows of those that the driver tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.promises import promise

from unisono.runtime.launch.placement import DriverGpu, gpus_of_driver, visible_gpus
from unisono.runtime.world import fix_workspaces

UUIDS = ("GPU-8932f937-d72c", "GPU-8932aaaa-0000", "GPU-11111111-2222", "GPU-fedc0000-3333")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,1", ("2", "1")),
        (" 2 , 1 ", ("2", "1")),
        ("0,1,7,2", ("0", "1")),  # no further than what is not there
        ("0,-1,2", ("0",)),
        ("0,,2", ("0",)),
        ("7", ()),
        ("1,1", ()),
        ("GPU-8932f,GPU-fe", ("GPU-8932f", "GPU-fe")),
        ("GPU-8932f,GPU-77,GPU-fe", ("GPU-8932f",)),
        ("GPU-8932", ()),  # two begin like this
    ],
)
def test_a_process_sees_the_gpus_that_cuda_would_show_it(
    text: str | None, seen: tuple[str, ...]
) -> None:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_gpus(environ, UUIDS) == seen
    assert visible_gpus(environ, ()) == ()


@promise("accelerators.1")
@pytest.mark.parametrize(
    ("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":0:0"), ("", "")]
)
def test_workspaces_are_fixed_unless_the_user_has_said_how(before: str | None, after: str) -> None:
    environ = {} if before is None else {"CUBLAS_WORKSPACE_CONFIG": before}
    fix_workspaces(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": after}


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

    return build


def test_gpus_are_those_of_the_driver(driver) -> None:
    driver()
    gpus = tuple(DriverGpu(f"GPU-{at}", "H200", 10, at) for at in range(3))
    assert [gpus_of_driver(), gpus_of_driver()] == [gpus, gpus]


def test_a_gpu_that_this_user_may_not_have_is_left_out(driver) -> None:
    driver(forbidden=1)
    assert [gpu.uuid for gpu in gpus_of_driver()] == ["GPU-0", "GPU-2"]


def test_a_gpu_that_has_no_memory_of_its_own_is_there(driver) -> None:
    driver("MemoryInfo")
    assert gpus_of_driver() == tuple(DriverGpu(f"GPU-{at}", "H200") for at in range(3))


@pytest.mark.parametrize("failing", ["Init", "Count"])
def test_a_driver_that_fails_has_no_gpus(driver, failing: str) -> None:
    driver(failing)
    assert gpus_of_driver() == ()

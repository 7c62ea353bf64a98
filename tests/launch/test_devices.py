"""What is said of the devices that workers compute on, once all have told."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.launch.devices import Devices, devices_line
from unisono.launch.job import SCRIPT, Job
from unisono.workers.launcher_messages import ComputesOn

CPU = ComputesOn("cpu", "")


def job(**facts: Any) -> Job:
    more: dict[str, Any] = {"threads": 1, "restarts": 0, "replaces": True, "stall_timeout_s": 60.0}
    return Job(kind=SCRIPT, target="x", environ={}, num_workers=2, backend="gloo", **more, **facts)


def on(*places: int, gpu: str = "NVIDIA H200") -> list[ComputesOn]:
    return [ComputesOn(f"cuda:{place}", gpu) for place in places]


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        (on(0), "1 worker computes on cuda:0 (NVIDIA H200)."),
        (on(0, 1), "2 workers compute on cuda:0 and cuda:1 (NVIDIA H200)."),
        (on(*range(8)), "8 workers compute on cuda:0 to cuda:7 (NVIDIA H200)."),
        (on(0, 0), "2 workers compute on cuda:0 (NVIDIA H200)."),
        (on(0, 0, 1, 1), "4 workers compute on cuda:0 and cuda:1 (NVIDIA H200), 2 on each."),
        (on(0, 0, 1), "3 workers compute on cuda:0 and cuda:1 (NVIDIA H200), up to 2 on each."),
        (on(0, 1, gpu=""), "2 workers compute on cuda:0 and cuda:1."),
        (
            [*on(0), *on(1, gpu="NVIDIA L4")],
            "2 workers compute: worker 0 on cuda:0 (NVIDIA H200), worker 1 on cuda:1 (NVIDIA L4).",
        ),
        (
            [*on(0), CPU],
            "2 workers compute: worker 0 on cuda:0 (NVIDIA H200), worker 1 on the CPU.",
        ),
        ([CPU], "1 worker computes on the CPU: `--gpus none` is better."),
        ([CPU, CPU], "2 workers compute on the CPU: `--gpus none` is better."),
    ],
)
def test_one_line_says_where_all_workers_compute(devices: list[ComputesOn], line: str) -> None:
    assert devices_line(devices, "`--gpus none` is better") == line


def test_who_asked_for_so_many_workers_on_the_cpu_gets_no_advice() -> None:
    assert devices_line([CPU, CPU]) == "2 workers compute on the CPU."


def test_it_is_said_once_when_the_last_has_told() -> None:
    said: list[str] = []
    devices = Devices(job(num_gpus=2), said.append)
    devices.hear(1, on(1)[0])
    devices.hear(1, on(1)[0])
    assert said == []
    devices.hear(0, on(0)[0])
    assert said == ["2 workers compute on cuda:0 and cuda:1 (NVIDIA H200)."]
    for rank in (0, 1):  # a second run, and a replacement
        devices.hear(rank, CPU)
    assert len(said) == 1


def test_on_a_machine_without_gpus_nothing_is_said() -> None:
    devices = Devices(job(), lambda line: pytest.fail(line))
    for rank in (0, 1):  # who sets UNISONO_WORKERS_PER_GPU has them tell
        devices.hear(rank, CPU)

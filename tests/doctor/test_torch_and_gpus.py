"""What is said of torch, GPUs and how they are connected; the driver is one of the test's own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import pytest

from unisono.doctor import gpu_links
from unisono.doctor.diagnoses import Diagnosis
from unisono.doctor.gpu_links import DriverGpu, gpus_and_links
from unisono.doctor.torch_checks import judge_gpus, judge_links, judge_torch, version_of

GIB = 2**30
CPU = {"version": "2.13.0+cpu", "cuda": None, "capability": "AVX512", "distributed": True}
CUDA = {**CPU, "version": "2.11.0+cu128", "cuda": "12.8", "arch_list": ["sm_80", "sm_90"]}
H200 = {"name": "H200", "memory": 141 * GIB, "capability": [9, 0]}
DRIVERS = DriverGpu("H200", 141 * GIB, 0, 16, 16)


def told(diagnoses: Iterable[Diagnosis]) -> list[tuple[str, str]]:
    return [(one.verdict, f"{one.evidence} {one.remedy}".strip()) for one in diagnoses]


@pytest.mark.parametrize(
    ("facts", "num_gpus", "verdict", "words"),
    [
        (CPU, 0, "ok", "torch 2.13.0+cpu, built for CPUs alone; it computes with AVX512"),
        (CPU, 2, "wrong", "and cannot use this machine's 2 GPUs. Install a torch for CUDA"),
        (CUDA, 2, "ok", "built for CUDA 12.8"),
        ({**CPU, "hip": "6.2"}, 0, "ok", "built for ROCm 6.2"),
        ({**CPU, "version": "2.4.1"}, 0, "wrong", "and is too old. Install torch 2.11"),
        ({**CPU, "distributed": False}, 0, "wrong", "is without torch.distributed"),
        ({**CPU, "capability": "DEFAULT"}, 0, "warning", "no vector instructions"),
    ],
)
def test_a_torch_is_judged(facts: Any, num_gpus: int, verdict: str, words: str) -> None:
    ((found, text),) = told([judge_torch(facts, num_gpus)])
    assert (found, words in text) == (verdict, True), text


@pytest.mark.parametrize(
    ("facts", "known", "expected"),
    [
        (CPU, [], [("ok", "No GPU: NVIDIA's driver knows of none here. Workers compute on the")]),
        ({}, [], [("ok", "No GPU")]),
        ({**CUDA, "gpus": [H200]}, [], [("warning", "that NVIDIA's driver does not list")]),
        ({**CUDA, "gpus": [H200]}, [DRIVERS], [("ok", "1 GPU (0: H200 with 141 GiB).")]),
        ({**CUDA, "gpu_trouble": "too old", "gpus": []}, [DRIVERS], [("wrong", "says: too old")]),
        (
            {**CUDA, "gpus": [{**H200, "capability": [12, 0]}]},
            [DRIVERS],
            [("ok", "1 GPU"), ("wrong", "no kernels for H200 (capability 12.0)")],
        ),
        (
            {**CUDA, "gpus": [H200] * 2},
            [DRIVERS._replace(pcie_lanes=4), DRIVERS._replace(memory_used=100 * GIB)],
            [("ok", "2 GPUs"), ("warning", "GPU 0 has 4 of 16"), ("warning", "of GPU 1's 141 GiB")],
        ),
    ],
)
def test_gpus_are_judged(facts: Any, known: Any, expected: list[tuple[str, str]]) -> None:
    found = told(judge_gpus(facts, known))
    assert [verdict for verdict, _ in found] == [verdict for verdict, _ in expected], found
    for (_, text), (_, words) in zip(found, expected, strict=True):
        assert words in text


def test_links_are_told_by_kind() -> None:
    ((_, text),) = told(judge_links({(0, 1): "NVLink (4 links)", (0, 2): "x", (1, 2): "x"}))
    assert text == "NVLink (4 links): 0–1; x: 0–2, 1–2."
    assert told(judge_links({})) == []


def test_versions() -> None:
    assert [version_of(text) for text in ("2.13.0+cpu", "2.9.1", "main")] == [
        (2, 13),
        (2, 9),
        (0, 0),
    ]


class Driver:
    """NVML as a driver with three GPUs would have it, of which two have NVLink."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.is_shut_down = fails, False

    def __getattr__(self, name: str) -> Any:
        answer = getattr(type(self), f"_{name}", None)
        if answer is None:
            raise AttributeError(name)

        def call(*given: Any) -> int:
            return 1 if name == self.fails else (answer(self, *given) or 0)

        return call

    def _nvmlInit_v2(self) -> None: ...

    def _nvmlShutdown(self) -> None:
        self.is_shut_down = True

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = 3

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        handle._obj.value = index.value + 1

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> None:
        buffer.value = b"H200"

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        memory._obj.total, memory._obj.used = 141 * GIB, GIB

    def _nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, width: Any) -> None:
        width._obj.value = 8

    def _nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, width: Any) -> None:
        width._obj.value = 16

    def _nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: Any, status: Any) -> None:
        assert index.value == 2
        status._obj.value = 0 if {one.value, other.value} == {1, 2} else 4

    def _nvmlDeviceGetNvLinkState(self, one: Any, link: Any, state: Any) -> None:
        state._obj.value = int(link.value < 4)

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, level: Any) -> None:
        level._obj.value = 50


def test_the_driver_is_asked_and_left() -> None:
    driver = Driver()
    gpus, links = gpus_and_links(driver)
    assert gpus == [DriverGpu("H200", 141 * GIB, GIB, 8, 16)] * 3
    assert links == {
        (0, 1): "NVLink (4 links)",
        (0, 2): "two processors",
        (1, 2): "two processors",
    }
    assert driver.is_shut_down
    assert ctypes.sizeof(gpu_links._Memory) == 24


@pytest.mark.parametrize(
    ("fails", "name", "kind"),
    [
        ("nvmlDeviceGetName", "a GPU", "NVLink (4 links)"),
        ("nvmlDeviceGetMemoryInfo", "H200", "NVLink (4 links)"),
        ("nvmlDeviceGetP2PStatus", "H200", "two processors"),
        ("nvmlDeviceGetTopologyCommonAncestor", "H200", "NVLink (4 links)"),
    ],
)
def test_what_a_driver_does_not_say_is_left_out(fails: str, name: str, kind: str) -> None:
    gpus, links = gpus_and_links(Driver(fails))
    assert (gpus[0].name, links[0, 1]) == (name, kind)
    expected = "not told" if "Ancestor" in fails else "two processors"
    assert links[0, 2] == expected

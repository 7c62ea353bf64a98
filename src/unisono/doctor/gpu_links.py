"""Which GPUs does NVIDIA's driver know, and how are they connected? Asked through NVML.

Never run on a GPU. What the driver does not say is left out. Source: NVML API reference.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from unisono.launch.nvml import asking_driver

_MAX_CHARS = 96
_MAX_NVLINKS = 18
_ON_THE_WAY = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe root",
    40: "one processor",
    50: "two processors",
}
_P2P_NVLINK, _P2P_OK = 2, 0


class DriverGpu(NamedTuple):
    """What the driver says of a GPU; 0 and empty where it does not.

    Attributes:
        name: its model.
        memory, memory_used: in bytes.
        pcie_lanes, pcie_lanes_at_most: now, and what it and its slot could have.
    """

    name: str
    memory: int = 0
    memory_used: int = 0
    pcie_lanes: int = 0
    pcie_lanes_at_most: int = 0


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpus_and_links(library: Any = None) -> tuple[list[DriverGpu], dict[tuple[int, int], str]]:
    """List GPUs, and say how each pair of them is connected; nothing without a driver.

    Args:
        library: NVML, for tests.
    """
    with asking_driver(library) as (nvml, handles):
        gpus = [_gpu(nvml, handle) for handle in handles]
        pairs = [(one, two) for two in range(len(handles)) for one in range(two)]
        links = {(a, b): _link(nvml, handles[a], handles[b]) for a, b in pairs}
        return gpus, links


def _gpu(nvml: Any, handle: ctypes.c_void_p) -> DriverGpu:
    name, memory = ctypes.create_string_buffer(_MAX_CHARS), _Memory()
    if nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_MAX_CHARS)):
        name.value = b"a GPU"
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        memory = _Memory()
    return DriverGpu(
        name.value.decode(errors="replace"),
        int(memory.total),
        int(memory.used),
        _number(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        _number(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )


def _link(nvml: Any, one: ctypes.c_void_p, other: ctypes.c_void_p) -> str:
    """Say how two GPUs are connected."""
    if _has_nvlink(nvml, one, other):
        links = [_number(nvml.nvmlDeviceGetNvLinkState, one, link) for link in range(_MAX_NVLINKS)]
        return f"NVLink ({sum(links)} links)"
    level = ctypes.c_int(-1)
    if nvml.nvmlDeviceGetTopologyCommonAncestor(one, other, ctypes.byref(level)):
        return "not told"
    return _ON_THE_WAY.get(level.value, f"level {level.value}")


def _has_nvlink(nvml: Any, one: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
    status = ctypes.c_int(-1)
    index = ctypes.c_int(_P2P_NVLINK)
    failed = nvml.nvmlDeviceGetP2PStatus(one, other, index, ctypes.byref(status))
    return not failed and status.value == _P2P_OK


def _number(ask: Any, *given: Any) -> int:
    """Ask for a whole number; 0 where there is no answer."""
    found = ctypes.c_uint(0)
    typed = [one if isinstance(one, ctypes.c_void_p) else ctypes.c_uint(one) for one in given]
    return 0 if ask(*typed, ctypes.byref(found)) else int(found.value)

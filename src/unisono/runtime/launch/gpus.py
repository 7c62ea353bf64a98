"""Which GPUs workers see: those of NVIDIA's driver that the environment shows.

All workers see the same GPUs in the same order; ``placement.py`` says who takes which. ::

    CUDA_VISIBLE_DEVICES=3,0    cuda:0 is GPU 3, cuda:1 is GPU 0, in every worker

The driver is asked through NVML, which loads in a moment and, unlike CUDA, leaves nothing behind: a
process that has begun to use CUDA must not fork, and a launcher may be a notebook's kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ON_CPU = f"{VISIBLE_VARIABLE}="  # how to ask for workers that see no GPU


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[str]) -> tuple[str, ...]:
    """Name the GPUs that a process with these variables sees, of the driver's, by number.

    As CUDA does, it stops at the first name that is not there, and sees none if one comes twice.
    """
    text = environ.get(VISIBLE_VARIABLE)
    if text is None or not gpus:
        return tuple(map(str, range(len(gpus))))
    seen: list[str] = []
    for name in map(str.strip, text.split(",")):
        if name.isdecimal():
            is_there = int(name) < len(gpus)
        else:
            is_there = name.startswith("MIG-") or sum(gpu.startswith(name) for gpu in gpus) == 1
            is_there = is_there or (name.startswith("GPU-") and not all(gpus))
        if not (name and is_there):
            break
        seen.append(name)
    return tuple(seen) if len(set(seen)) == len(seen) else ()


_LIBRARY = "libnvidia-ml.so.1"


class DriverGpu(NamedTuple):
    """What the driver says of a GPU; 0 and empty where it does not."""

    uuid: str
    name: str = ""
    memory: int = 0
    memory_used: int = 0


def gpus_of_driver() -> tuple[DriverGpu, ...]:
    """List the GPUs that processes of this user may use, in the order of `nvidia-smi`.

    All of them, while ``ddp.init_checks.num_gpus`` counts those that one process sees; none
    without NVIDIA's driver.
    """
    try:
        ctypes.CDLL(_LIBRARY)  # without it, its bindings need not be loaded, for 15 ms
    except OSError:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpus(pynvml))
    finally:
        pynvml.nvmlShutdown()


def _gpus(nvml: Any) -> Iterator[DriverGpu]:
    def told(ask: Callable[[Any], Any], gpu: Any, otherwise: Any) -> Any:
        with suppress(nvml.NVMLError):
            return ask(gpu)
        return otherwise

    for index in range(told(lambda _: nvml.nvmlDeviceGetCount(), None, 0)):
        # One that this user may not have is counted, and so is one that is broken.
        gpu = told(nvml.nvmlDeviceGetHandleByIndex, index, None)
        if gpu is not None:
            memory = told(nvml.nvmlDeviceGetMemoryInfo, gpu, None)
            yield DriverGpu(
                told(nvml.nvmlDeviceGetUUID, gpu, ""),
                told(nvml.nvmlDeviceGetName, gpu, "a GPU"),
                *((memory.total, memory.used) if memory else (0, 0)),
            )

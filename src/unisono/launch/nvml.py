"""Which GPUs does NVIDIA's driver know? Asked through its management library, NVML.

Unlike torch or CUDA itself, it is loaded in a moment and leaves nothing behind in the process: a
launcher may be a notebook's kernel, and a process that has begun to use CUDA must not fork.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"


class DriverGpu(NamedTuple):
    """What the driver says of a GPU; 0 and empty where it does not.

    Attributes:
        uuid: its unique name, such as ``GPU-8932f937-d72c-4106-c12f-20bd9faed9f6``.
        name: its model.
        memory, memory_used: in bytes.
    """

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

"""Which GPUs does NVIDIA's driver know? Asked through its management library, NVML.

Unlike torch or CUDA itself, it is loaded in a moment and leaves nothing behind in the process: a
launcher may be a notebook's kernel, and a process that has begun to use CUDA must not fork.
Source: NVML API reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_MAX_CHARS = 96  # of a UUID, with the 0 at its end


def gpus_of_driver() -> tuple[str, ...]:
    """List the GPUs that processes of this user may use, in the order of `nvidia-smi`.

    All of them, while ``ddp.cuda_device.num_gpus`` counts those that one process sees.

    Returns:
        The unique name of each, such as ``GPU-8932f937-d72c-4106-c12f-20bd9faed9f6``, or an empty
        text where the driver does not say it; none without NVIDIA's driver.
    """
    with asking_driver() as (nvml, gpus):
        return tuple(_uuid(nvml, gpu) for gpu in gpus)


@contextmanager
def asking_driver(nvml: Any = None) -> Iterator[tuple[Any, list[ctypes.c_void_p]]]:
    """Give NVML, and a handle of each GPU that this user may have; none without a driver.

    Args:
        nvml: the library, for tests.
    """
    with suppress(OSError):
        nvml = ctypes.CDLL(_LIBRARY) if nvml is None else nvml
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield nvml, []
        return
    try:
        yield nvml, list(_handles(nvml))
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint(0)
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return
    for index in range(count.value):
        handle = ctypes.c_void_p()
        # One that this user may not have is counted, and so is one that is broken.
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            yield handle


def _uuid(nvml: Any, gpu: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_MAX_CHARS)
    failed = nvml.nvmlDeviceGetUUID(gpu, buffer, ctypes.c_uint(_MAX_CHARS))
    return "" if failed else buffer.value.decode(errors="replace")

"""Which GPUs does NVIDIA's driver know? Asked through its management library, NVML.

Unlike torch or CUDA itself, it is loaded in a moment and leaves nothing behind in the process: a
launcher may be a notebook's kernel, and a process that has begun to use CUDA must not fork.
Source: NVML API reference.
"""

from __future__ import annotations

import ctypes
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
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint(0)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        names = (_uuid(nvml, index) for index in range(count.value))
        return tuple(name for name in names if name is not None)
    finally:
        nvml.nvmlShutdown()


def _uuid(nvml: Any, index: int) -> str | None:
    """Name a GPU; None where this user may not have it (it is counted), or it is broken."""
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    buffer = ctypes.create_string_buffer(_MAX_CHARS)
    failed = nvml.nvmlDeviceGetUUID(handle, buffer, ctypes.c_uint(_MAX_CHARS))
    return "" if failed else buffer.value.decode(errors="replace")

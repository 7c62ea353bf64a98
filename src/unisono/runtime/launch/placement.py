"""How many workers are there, and on which GPUs? Decided before anything is started.

::

    workers and workers per GPU requested  ┐
    CUDA_VISIBLE_DEVICES, …                ├─► Placement, or a ValueError with the remedy
    the GPUs and cores of this machine     ┘

Worker `local_rank` gets ``cuda:(local_rank // workers_per_gpu)``, and all workers see the same GPUs
in the same order. ``device.py`` reads the decision from ``UNISONO_WORKERS_PER_GPU``.

GPUs are listed through NVML: a process that has initialized CUDA must not fork.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unisono.runtime.notices import plural
from unisono.runtime.world import (
    WORKERS_PER_GPU_VARIABLE,
    fix_workspaces,
    num_devices,
    workers_per_gpu,
)

_WORKERS_AT_MOST = 1024
_FILES_BESIDE = 128  # open files of a launcher and its fork server, besides one per worker
_TURNS_AT_MOST = 8  # workers per core; above that, a warning is printed


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of a machine for workers."""

    num_cores: int  # the default number of workers and shards
    gpus: tuple[str, ...] = ()  # the UUIDs of the GPUs that NVIDIA's driver lists
    open_files: float = math.inf  # how many files a process may open

    @classmethod
    def here(cls) -> Machine:
        """Return the resources of this machine."""
        gpus = tuple(gpu.uuid for gpu in gpus_of_driver())
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        is_limited = files != resource.RLIM_INFINITY
        return cls(num_devices(), gpus, files if is_limited else math.inf)


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of workers, and the GPU variables of their environment."""

    num_workers: int  # the number of workers
    # the GPUs that workers see, by name, as far as known; empty: they compute on the CPU
    gpus: tuple[str, ...] = ()
    # variables of every worker in addition to the launcher's
    variables: Mapping[str, str] = field(default_factory=dict)


def place_workers(
    workers: int | None,
    workers_each: int | None,
    environ: Mapping[str, str],
    machine: Machine,
) -> Placement:
    """Decide how many workers to start, and on which GPUs, or raise a ValueError."""
    gpus = visible_gpus(environ, machine.gpus)
    if not gpus and workers_each is not None:
        raise ValueError(
            f"`--workers-per-gpu` or `workers_per_gpu` must be left out where workers get no GPU, "
            f"but is {workers_each}, and of the {len(machine.gpus)} GPUs that NVIDIA's driver "
            f"knows, {VISIBLE_VARIABLE} shows none: leave it out, and the workers compute on the "
            f"CPU."
        )
    each = workers_per_gpu(environ) if gpus and workers_each is None else workers_each or 1
    num_workers = workers or len(gpus) * each or machine.num_cores
    if num_workers > _WORKERS_AT_MOST:
        raise ValueError(
            f"there must be at most {_WORKERS_AT_MOST:,} workers, but {num_workers:,} are asked "
            f"for: start about one for each core."
        )
    if num_workers + _FILES_BESIDE > machine.open_files:
        raise ValueError(
            f"{num_workers:,} workers need {num_workers + _FILES_BESIDE:,} open files in their "
            f"launcher, but this process may open {machine.open_files:,.0f}: start fewer, or "
            f"enter `ulimit -n {num_workers + _FILES_BESIDE}` before."
        )
    if not gpus:
        return Placement(num_workers)
    if num_workers > len(gpus) * each:
        raise ValueError(
            f"there must be at most {plural(len(gpus) * each, 'worker')} here, {each} for each GPU "
            f"({','.join(gpus)}), but {num_workers} are asked for: start fewer, share GPUs with "
            f"`{WORKERS_PER_GPU_VARIABLE}={-(-num_workers // len(gpus))}` in the environment, or "
            f"compute on the CPU with `{VISIBLE_VARIABLE}=` there."
        )
    variables = dict(environ)
    fix_workspaces(variables)
    variables[WORKERS_PER_GPU_VARIABLE] = str(each)
    changed = {name: value for name, value in variables.items() if environ.get(name) != value}
    return Placement(num_workers, gpus, changed)


def crowded(num_workers: int, num_cores: int) -> str:
    """Return a warning if there are far more workers than cores; otherwise an empty string."""
    if num_workers <= _TURNS_AT_MOST * num_cores:
        return ""
    return (
        f"{num_workers:,} workers take turns on {plural(num_cores, 'core')}, which is slow: start "
        f"about one for each core; the result does not depend on their number"
    )


VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that a process sees. As CUDA does, stop at an unknown name; no duplicates."""
    text = environ.get(VISIBLE_VARIABLE)
    if text is None or not gpus:
        return tuple(map(str, range(len(gpus))))
    seen: list[str] = []
    for name in map(str.strip, text.split(",")):
        if name.isdecimal():
            is_there = int(name) < len(gpus)
        else:
            is_there = name.startswith("MIG-") or sum(gpu.startswith(name) for gpu in gpus) == 1
        if not (name and is_there):
            break
        seen.append(name)
    return tuple(seen) if len(set(seen)) == len(seen) else ()


class DriverGpu(NamedTuple):
    """What the driver reports of a GPU; 0 for unknown numbers."""

    uuid: str
    name: str = ""
    memory: int = 0
    memory_used: int = 0


def gpus_of_driver() -> tuple[DriverGpu, ...]:
    """Return the GPUs that processes of this user may use, in the order of `nvidia-smi`."""
    import pynvml

    gpus = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                # The count includes GPUs that are broken or that this user may not access.
                with suppress(pynvml.NVMLError):
                    gpus.append(_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
        finally:
            pynvml.nvmlShutdown()
    return tuple(gpus)


def _gpu(nvml: Any, handle: Any) -> DriverGpu:
    gpu = DriverGpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle))
    with suppress(nvml.NVMLError):  # a GPU that uses the host's memory does not report its own
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return gpu._replace(memory=memory.total, memory_used=memory.used)
    return gpu

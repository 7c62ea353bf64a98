"""How many workers are there, and on which GPUs? Decided before anything is started.

::

    workers and workers per GPU asked for ┐
    CUDA_VISIBLE_DEVICES, …               ├─► Placement, or a ValueError with the way out
    the GPUs and cores of this machine    ┘

Worker `local_rank` takes ``cuda:(local_rank // workers_per_gpu)``, and all of them see the same
GPUs in the same order; ``device.py`` believes what is said here in ``UNISONO_WORKERS_PER_GPU``.
Where there is no GPU, nothing is said. What a program then does with its GPU is its own affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.runtime.launch.gpus import (
    ON_CPU,
    VISIBLE_VARIABLE,
    gpus_of_driver,
    visible_gpus,
)
from unisono.runtime.notices import plural
from unisono.runtime.world import (
    WORKERS_PER_GPU_VARIABLE,
    fix_workspaces,
    num_devices,
    workers_per_gpu,
)

_WORKERS_AT_MOST = 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has for workers."""

    num_cores: int  # those that workers and shards default to
    gpus: tuple[str, ...] = ()  # the unique names of those that NVIDIA's driver knows

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine."""
        return cls(num_devices(), tuple(gpu.uuid for gpu in gpus_of_driver()))


@dataclass(frozen=True, slots=True)
class Placement:
    """How many workers there are, and what their environment says of GPUs."""

    num_workers: int  # how many
    # the GPUs that they see, by name, as far as they are told; empty: they compute on the CPU
    gpus: tuple[str, ...] = ()
    # what the environment of every worker has beside the launcher's own
    variables: Mapping[str, str] = field(default_factory=dict)


def place_workers(
    workers: int | None,
    workers_each: int | None,
    environ: Mapping[str, str],
    machine: Machine,
) -> Placement:
    """Decide how many workers are started, and on which GPUs.

    By default there is one worker for each GPU that the environment shows, and without one, one
    for each core, at most 8. Raises a ValueError with the way out where that does not fit.
    """
    _refuse_too_many(workers or 1)
    gpus = visible_gpus(environ, machine.gpus)
    if not gpus:
        if workers_each is not None:
            raise ValueError(_no_gpu_to_share(workers_each, environ, machine))
        return Placement(workers or machine.num_cores)
    each = workers_per_gpu(environ) if workers_each is None else workers_each
    num_workers = workers or len(gpus) * each
    _refuse_too_many(num_workers)
    if num_workers > len(gpus) * each:
        raise ValueError(_too_few_gpus(gpus, num_workers, each))
    return Placement(num_workers, gpus, _variables(each, environ))


def _refuse_too_many(num_workers: int) -> None:
    if num_workers > _WORKERS_AT_MOST:
        raise ValueError(
            f"there must be at most {_WORKERS_AT_MOST:,} workers, but {num_workers:,} are asked "
            f"for: start about one for each core."
        )


def _variables(each: int, environ: Mapping[str, str]) -> dict[str, str]:
    found = dict(environ)
    fix_workspaces(found)
    found[WORKERS_PER_GPU_VARIABLE] = str(each)
    return {name: value for name, value in found.items() if environ.get(name) != value}


def _too_few_gpus(gpus: tuple[str, ...], num_workers: int, each: int) -> str:
    sharing = f"{WORKERS_PER_GPU_VARIABLE}={-(-num_workers // len(gpus))}"
    workers = "one" if each == 1 else str(each)
    return (
        f"there must be at most {plural(len(gpus) * each, 'worker')} here, {workers} for each GPU "
        f"({','.join(gpus)}), but {num_workers} are asked for: start fewer, share GPUs with "
        f"`{sharing}` in the environment, or compute on the CPU with `{ON_CPU}` there."
    )


def _no_gpu_to_share(workers_each: int, environ: Mapping[str, str], machine: Machine) -> str:
    if not machine.gpus:
        why = "NVIDIA's driver knows of none here"
    else:
        why = f"{VISIBLE_VARIABLE} is {environ.get(VISIBLE_VARIABLE, '')!r}"
    return (
        f"`--workers-per-gpu` or `workers_per_gpu` must be left out where workers get no GPU, but "
        f"is {workers_each}, and {why}: leave it out, and the workers compute on the CPU."
    )

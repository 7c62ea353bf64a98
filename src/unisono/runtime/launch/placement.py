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

from unisono.runtime.cublas import fix_workspaces
from unisono.runtime.launch.gpus import (
    ON_CPU,
    VISIBLE_VARIABLE,
    OptionNames,
    gpus_of_driver,
    visible_gpus,
)
from unisono.runtime.world import WORKERS_PER_GPU_VARIABLE, num_devices, workers_per_gpu

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
    names: OptionNames,
    workers: int | None,
    workers_each: int | None,
    environ: Mapping[str, str],
    machine: Machine,
) -> Placement:
    """Decide how many workers are started, and on which GPUs.

    By default there is one worker for each GPU that the environment shows, and without one, one
    for each core, at most 8.

    Args:
        names: what the user calls the next two.
        workers: how many the user asks for; None: the default.
        workers_each: how many on each GPU; None: what the environment says.
        environ: the launcher's variables.
        machine: this one.

    Raises:
        ValueError: they do not fit together, or the machine; the message says what to do.
    """
    _refuse_too_many(names, workers or 1)
    gpus = visible_gpus(environ, machine.gpus)
    if not gpus:
        if workers_each is not None:
            raise ValueError(_no_gpu_to_share(names, workers_each, environ, machine))
        return Placement(workers or machine.num_cores)
    each = workers_per_gpu(environ) if workers_each is None else workers_each
    num_workers = workers or len(gpus) * each
    _refuse_too_many(names, num_workers)
    if num_workers > len(gpus) * each:
        raise ValueError(_too_few_gpus(names, gpus, num_workers, each))
    return Placement(num_workers, gpus, _variables(each, environ))


def _refuse_too_many(names: OptionNames, num_workers: int) -> None:
    if num_workers > _WORKERS_AT_MOST:
        raise ValueError(
            f"`{names.workers}` must be at most {_WORKERS_AT_MOST:,}, but is {num_workers:,}: "
            f"start about one worker for each core."
        )


def _variables(each: int, environ: Mapping[str, str]) -> dict[str, str]:
    found = dict(environ)
    fix_workspaces(found)
    found[WORKERS_PER_GPU_VARIABLE] = str(each)
    return {name: value for name, value in found.items() if environ.get(name) != value}


def _too_few_gpus(names: OptionNames, gpus: tuple[str, ...], num_workers: int, each: int) -> str:
    at_most = len(gpus) * each
    sharing = names.sharing.format(-(-num_workers // len(gpus)))
    listed = ",".join(gpus)
    workers = "one worker" if each == 1 else f"{each} workers"
    return (
        f"`{names.workers}` must be at most {at_most} here, {workers} for each GPU ({listed}), but "
        f"is {num_workers}: start fewer, share GPUs with `{sharing}`, or compute on the CPU with "
        f"`{ON_CPU}` in the environment."
    )


def _no_gpu_to_share(
    names: OptionNames, workers_each: int, environ: Mapping[str, str], machine: Machine
) -> str:
    if not machine.gpus:
        why = "NVIDIA's driver knows of none here"
    else:
        why = f"{VISIBLE_VARIABLE} is {environ.get(VISIBLE_VARIABLE, '')!r}"
    return (
        f"`{names.workers_per_gpu}` must be left out where workers get no GPU, but is "
        f"{workers_each}, and {why}: leave it out, and the workers compute on the CPU."
    )

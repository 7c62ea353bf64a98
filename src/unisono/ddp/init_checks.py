"""Decisions of ``unisono.init``: each rank's device and backend, and what all ranks agree on.

Only :func:`num_gpus` asks for GPUs. (The launcher, which must not initialize CUDA, asks the driver:
``launch/nvml.py``.) What all ranks agree on they decide alike, from what each has told the others:
they may have chosen different seeds, different backends (they would wait for each other until the
time is up) or the same GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.errors import MismatchError
from unisono.workers.rendezvous import RankPlaces
from unisono.world import SOMEBODY, WORKERS_PER_GPU_VARIABLE, World

_FOR_GPUS, _FOR_CPUS, _FOR_HOSTS = "nccl", "unisono", "gloo"


def num_gpus() -> int:
    """Count the GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(
    here: World, backend: str | None, gpus: int, sharing: int = 1, num_hosts: int = 1
) -> tuple[str, torch.device]:
    """Choose what a program has left open.

    Args:
        here: the worker's place.
        backend: what the program asks for, as ``init_process_group`` takes it; None: ``"nccl"``
            where there are GPUs, else ``"unisono"``, or ``"gloo"`` on several hosts.
        gpus: how many GPUs this process sees.
        sharing: how many workers share each GPU.
        num_hosts: on how many hosts the ranks are.

    Returns:
        The backend, and this worker's device: its own GPU if the backend is NCCL, else the CPU.

    Raises:
        ValueError: there are too few GPUs for the workers of this host, or none, or they share
            them, which NCCL refuses; or the backend is for one host.
    """
    if backend is None:
        backend = _FOR_GPUS if gpus else _FOR_CPUS if num_hosts == 1 else _FOR_HOSTS
    if num_hosts > 1 and _FOR_CPUS in backend:
        raise ValueError(
            f"`backend` must join several hosts ({num_hosts}), but {backend!r} joins processes of "
            f"one, which share memory: leave it out, or pass `backend={_FOR_HOSTS!r}`."
        )
    if _FOR_GPUS not in backend:
        return backend, torch.device("cpu")
    if sharing > 1 and here.local_world_size > 1:
        raise ValueError(
            f"each worker must have a GPU of its own for the backend {backend!r}, but {sharing} of "
            f"them share each GPU ({WORKERS_PER_GPU_VARIABLE}={sharing}): start them without "
            f'`--workers-per-gpu`, or pass `backend="unisono"`, or "gloo" on several hosts, to '
            f"compute on the CPU."
        )
    if gpus >= here.local_world_size:
        return backend, torch.device("cuda", here.local_rank)
    if gpus == 1:
        # For example Slurm shows each task its own GPU alone, as number 0. If all have the same
        # one, `init_checks.py` refuses it.
        return backend, torch.device("cuda", 0)
    raise ValueError(
        f"each of the {here.local_world_size} workers of this host must have a GPU of its own for "
        f"the backend {backend!r}, but rank {here.rank} sees {gpus}: start fewer workers, or pass "
        f'`backend="unisono"`, or "gloo" on several hosts, to compute on the CPU.'
    )


def name_of(device: torch.device) -> str:
    """Return a GPU's unique name, the same in every process; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def model_of(device: torch.device) -> str:
    """Return what a GPU is sold as; empty for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one rank has chosen."""

    backend: str  # as torch takes it
    seed: int | None  # what it was given; None where rank 0 is to draw one
    drawn: int  # what counts if this is rank 0 and no seed was given
    gpu: str = ""  # its GPU's own name, the same in every process; empty on the CPU

    @classmethod
    def made(cls, backend: str, seed: int | None, gpu: str) -> Choice:
        """Choose, with a random number as `drawn`."""
        return cls(backend, seed, int.from_bytes(os.urandom(7), "little"), gpu)


def agreed_seed(choices: Sequence[Choice]) -> int:
    """Check that the ranks' choices, in rank order, fit together; return the seed of all.

    Raises:
        MismatchError: ranks pass different seeds, or have different backends.
        ValueError: two of them have the same GPU.
    """
    first = choices[0]
    owners: dict[str, int] = {}
    for rank, choice in enumerate(choices):
        if choice.backend != first.backend:
            raise MismatchError(
                f"`backend` must be the same on every rank, but is {first.backend!r} on rank 0 and "
                f"{choice.backend!r} on rank {rank}: pass the same everywhere. (None is 'nccl' "
                f"where a process sees GPUs, else 'unisono', or 'gloo' on several hosts: look why "
                f"these two differ there.)"
            )
        if choice.seed != first.seed:
            raise MismatchError(
                f"`seed` must be the same on every rank, so that all make the same model, but is "
                f"{first.seed} on rank 0 and {choice.seed} on rank {rank}: pass the same "
                f"everywhere, and call `seed_apart()` of what `unisono.init` returns where ranks "
                f"are to differ."
            )
        if choice.gpu and owners.setdefault(choice.gpu, rank) != rank:
            raise ValueError(
                f"each worker must have a GPU of its own for the backend {choice.backend!r}, but "
                f"ranks {owners[choice.gpu]} and {rank} have the same one ({choice.gpu}): start "
                f'fewer workers, or pass `backend="unisono"`, or "gloo" on several hosts, to '
                f"compute on the CPU."
            )
    return first.drawn if first.seed is None else first.seed


def place_among(here: World, places: RankPlaces, environ: Mapping[str, str]) -> World:
    """Correct a worker's place by where the ranks are.

    By hand, and in containers with one process each, RANK and WORLD_SIZE are often all that is set;
    :func:`unisono.world` then takes all ranks for those of one host.

    Args:
        here: the place by the environment.
        places: where the ranks have found each other.
        environ: the variables; what they say of a worker's place on its host is believed.

    Returns:
        `here`, or with ranks counted per host.
    """
    if here.started_by != SOMEBODY or "LOCAL_RANK" in environ:
        return here
    return World(
        *(here.rank, here.world_size, places.local_rank, places.local_size),
        started_by=here.started_by,
    )

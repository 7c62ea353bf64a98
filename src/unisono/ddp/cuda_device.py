"""Chooses the device that a worker computes on, and the backend.

Only :func:`num_gpus` asks for GPUs. (The launcher, which must not initialize CUDA, asks the driver:
``launch/nvml.py``.)
"""

from __future__ import annotations

import torch

from unisono.world import WORKERS_PER_GPU_VARIABLE, World

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

"""How many workers may one job have? More than anybody needs, fewer than a slip of the finger."""

from __future__ import annotations

import os

_ALWAYS_ALLOWED = 256
_PER_CORE = 8


def num_workers_at_most(num_cores: int) -> int:
    """Say how many workers a machine with `num_cores` cores may be asked for."""
    return max(_ALWAYS_ALLOWED, _PER_CORE * num_cores)


def too_many_workers(name: str, num_workers: int) -> str:
    """Say in one sentence why `num_workers` are too many here; empty when they are not.

    Args:
        name: what the caller passed the number as, such as ``-n``.
        num_workers: how many workers are asked for.
    """
    num_cores = len(os.sched_getaffinity(0))
    at_most = num_workers_at_most(num_cores)
    if num_workers <= at_most:
        return ""
    cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
    return (
        f"`{name}` must be at most {at_most:,} on this machine, but is {num_workers:,}: "
        f"start about one worker for each core (it has {cores})."
    )

"""Which processes must not train as workers? Each is refused before it trains alone.

*What a worker starts* inherits the worker's variables, but has no seat. *Ranks of a process group*
that RANK and WORLD_SIZE do not tell of would not take part.

*Processes of* ``torch.multiprocessing.spawn`` are ranks in the eyes of their program, but nothing
in the environment says so. What tells them apart from a single process with a training of its own
(of a ``ProcessPoolExecutor``, a search for hyperparameters, a ``spawn`` of one) is that torch hands
each its index: whoever has an index above 0 is one of several. That one is refused, and torch then
ends the others, the one with index 0 among them, and raises in the program that has spawned them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from unisono.workers.launcher_link import PID_VARIABLE, is_worker
from unisono.world import SOMEBODY, World

_WRAPPER = ("torch.multiprocessing.spawn", "_wrap")


def refuse_children(here: World) -> None:
    """Refuse what a worker has started: it has that one's variables, but not its seat.

    Raises:
        RuntimeError: this process is one.
    """
    if PID_VARIABLE in os.environ and not is_worker():
        raise RuntimeError(
            f"what a worker starts must not train in its place, but this process has the variables "
            f"of rank {here.rank} of {here.world_size} and is another one than that worker "
            f"(process {os.environ[PID_VARIABLE]}): train in the worker itself; for a training of "
            f"its own, start it without {PID_VARIABLE}, RANK and WORLD_SIZE."
        )


def refuse_larger_group(here: World) -> None:
    """Refuse one of a process group with others who would not take part.

    Raises:
        ValueError: torch's process group has more ranks than there are workers.
    """
    dist = _process_groups()
    if dist is None:
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > here.world_size:
        raise ValueError(
            f"every rank of torch's process group must be one of the workers that train together, "
            f"but the group has {world_size} (this process is rank {rank}) where RANK and "
            f"WORLD_SIZE tell of {here.world_size}: set "
            f'`os.environ["RANK"] = "{rank}"` and `os.environ["WORLD_SIZE"] = "{world_size}"`, in '
            f"each process its own rank, or start the program with `unisono run -n {world_size}` "
            f"instead of `mp.spawn`."
        )


def refuse_spawned(here: World) -> None:
    """Refuse one of several spawned processes that does not know of the others.

    One that sets RANK and WORLD_SIZE, or makes a process group, has said who it is.

    Raises:
        RuntimeError: this process is one.
    """
    index = _spawned_index()
    if index == 0 or here.world_size > 1 or here.started_by == SOMEBODY or _process_groups():
        return
    raise RuntimeError(
        f"workers that train together must know of each other, but this process (index {index} of "
        f"`torch.multiprocessing.spawn`) has neither RANK nor WORLD_SIZE, and would train the "
        f"whole run alone, as each of the others: call `unisono.launch(fn, workers=…)` instead of "
        f'`mp.spawn`. For a training of its own in each process, set `os.environ["RANK"] = "0"` '
        f'and `os.environ["WORLD_SIZE"] = "1"` there.'
    )


def _spawned_index() -> int:
    """Tell which of the processes that torch has spawned this one is; 0 for any other process."""
    process: Any = multiprocessing.current_process()
    target = getattr(process, "_target", None)
    names = (getattr(target, "__module__", ""), getattr(target, "__name__", ""))
    arguments: Any = getattr(process, "_args", ())
    if names != _WRAPPER or len(arguments) < 2 or not isinstance(arguments[1], int):
        return 0
    return arguments[1]


def _process_groups() -> Any:
    """Give torch.distributed if this process has made a process group; else None."""
    dist: Any = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    return dist if has_group else None

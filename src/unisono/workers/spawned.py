"""Is this process one of several that ``torch.multiprocessing.spawn`` has started?

They are ranks in the eyes of their program, but nothing in the environment says so: each would
train the whole run alone. What tells them apart from a single process with a training of its own
(of a ``ProcessPoolExecutor``, a search for hyperparameters, a ``spawn`` of one) is that torch
hands each its index: whoever has an index above 0 is one of several. That one is refused, and torch
then ends the others, the one with index 0 among them, and raises in the program that has spawned
them.

Who sets RANK and WORLD_SIZE in each process, or makes a process group of one, has said who it is.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from unisono.world import SOMEBODY, World

_WRAPPER = ("torch.multiprocessing.spawn", "_wrap")


def refuse_spawned(here: World) -> None:
    """Refuse one of several spawned processes that does not know of the others.

    Raises:
        RuntimeError: this process is one.
    """
    index = _spawned_index()
    if index == 0 or here.world_size > 1 or here.started_by == SOMEBODY or _has_group():
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


def _has_group() -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())

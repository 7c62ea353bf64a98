"""What of torch is replaced in a worker: this table, applied once, before its program runs.

Nothing else of torch is replaced anywhere. What torch lets others add is not in here: the backend's
name (`c10d/registration.py`), and kernels that refuse collectives in a pass (`forbidden.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

from unisono.runtime.c10d.registration import GLOO, on_our_backend
from unisono.runtime.hangs.collective_notes import METHODS, noting
from unisono.runtime.launch.group_lifetime import freeing_group_last
from unisono.runtime.launch.process_groups import meeting_in_launchers_store
from unisono.runtime.workers.control_block import ControlBlock


class Patch(NamedTuple):
    """Names of torch's that are replaced."""

    owner: str  # a module or a class
    names: Sequence[str]  # those that this torch lacks are left out
    ours: Callable[[Any], Any]  # from torch's own
    why: str


def patches(control: ControlBlock, rank: int, backend: str) -> list[Patch]:
    """Return the table for one worker, whose program's gloo groups run on `backend`."""
    table = [
        Patch(
            "torch.distributed.rendezvous",
            ["_rendezvous_handlers"],
            meeting_in_launchers_store,
            "Ranks meet in the launcher's store, without a port that other jobs may have.",
        ),
        Patch(
            "torch.nn.parallel.DistributedDataParallel",
            ["_ddp_init_helper"],
            freeing_group_last,
            "A reducer that frees its group last, with the GIL, may never return.",
        ),
        Patch(
            "torch.distributed.ProcessGroup",
            METHODS,
            noting(control, rank),
            "The launcher shows in which collective a rank waits, with which shapes.",
        ),
        Patch(
            "torch.distributed.distributed_c10d",
            ["_new_process_group_helper"],
            on_our_backend(rank),
            "Libraries accept only the name gloo on CPUs; `--backend unisono` runs such groups.",
        ),
    ]
    return table if backend != GLOO else table[:-1]


def apply(table: Sequence[Patch]) -> None:
    """Replace what a table lists, in this process and its forks."""
    for patch in table:
        owner = resolve_name(patch.owner)
        for name in patch.names:
            if name in vars(owner):
                setattr(owner, name, patch.ours(vars(owner)[name]))

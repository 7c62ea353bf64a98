"""Frees a DDP model's reducer before its process group.

After ``destroy_process_group()`` the model's reducer may hold the group's last reference. It frees
the group while it holds the GIL, and gloo then waits for its threads, one of which may wait for the
GIL to free what is left of the last call: a deadlock at the end of every fifth program that makes
its model inside of a function (torch 2.13).

A group whose last reference is Python's is freed without the GIL. So one is kept until the reducer
and its logger, which shares it, are gone: callbacks of weak references to such objects run after
their C++ halves are freed.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any


def free_group_last(model: Any) -> None:
    """Keep a DDP model's group until its reducer is freed."""
    for holder in (model.reducer, model.logger):
        weakref.finalize(holder, _let_go, model.process_group).atexit = False


def free_groups_of_torchs_ddp_last() -> None:
    """Do :func:`free_group_last` for each DDP model of torch's that this process makes."""
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    make_reducer = ddp._ddp_init_helper

    @functools.wraps(make_reducer)
    def make_reducer_and_keep_group(self: Any, *args: Any, **kwargs: Any) -> None:
        make_reducer(self, *args, **kwargs)
        free_group_last(self)

    ddp._ddp_init_helper = make_reducer_and_keep_group


def _let_go(group: object) -> None:
    """Drop a reference, at the end of this call."""

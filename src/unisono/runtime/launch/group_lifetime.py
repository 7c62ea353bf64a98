"""Free the process groups of DDP models without deadlock.

After ``destroy_process_group()`` a DDP model's reducer may hold the group's last reference. It
frees the group while it holds the GIL, and gloo then waits for a thread that may wait for the GIL
(torch 2.13). A group whose last reference is Python's is freed without the GIL, so one reference is
kept until the reducer and its logger are gone.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any


def free_group_last(model: Any) -> None:
    """Keep a DDP model's group until its reducer is freed."""
    for holder in (model.reducer, model.logger):
        weakref.finalize(holder, _release, model.process_group).atexit = False


def freeing_group_last(make_reducer: Callable[..., None]) -> Callable[..., None]:
    """Return what creates a DDP model's reducer and calls :func:`free_group_last`."""

    @functools.wraps(make_reducer)
    def make_reducer_and_keep_group(model: Any, *args: Any, **kwargs: Any) -> None:
        make_reducer(model, *args, **kwargs)
        free_group_last(model)

    return make_reducer_and_keep_group


def _release(group: object) -> None:
    """Drop a reference when this call returns."""

"""Replaces gloo by our backend, for libraries that accept only the name "gloo" on CPUs.

Accelerate, transformers and Lightning compare the backend's name with those they know. So our
backend makes the gloo groups, and ``get_backend()`` still returns the name that was asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from unisono.c10d.registration import NAME
from unisono.notices import say

GLOO = "gloo"
BACKENDS = (GLOO, NAME)


def check_backend(option: str, name: object) -> None:
    """Check what was passed to ``unisono run --backend`` or ``launch(backend=)``.

    Raises:
        ValueError: it is neither "gloo" nor "unisono".
    """
    if name not in BACKENDS:
        raise ValueError(
            f"`{option}` must be {GLOO} or {NAME}, but is {name!r}: pass {NAME!r} to run the "
            f"program's gloo groups on Unisono's backend."
        )


def replace_gloo(rank: int) -> None:
    """Make our backend the backend of all gloo groups that this process creates from now on.

    Holds for forks of this process, too; processes that it spawns have torch's gloo.

    Args:
        rank: the rank of this worker; rank 0 reports groups that stay on gloo.
    """
    from torch.distributed import distributed_c10d as torchs

    made: Callable[..., Any] = torchs._new_process_group_helper
    signature = inspect.signature(made)

    @functools.wraps(made)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        asked = given.arguments["backend"]
        backends = torchs.BackendConfig(asked).get_device_backend_map()
        if backends.get("cpu") != GLOO or _has_gpus_too(asked, backends, rank):
            return made(*args, **kwargs)
        given.arguments.update(backend=NAME, backend_options=None)  # gloo reads no options
        group, store = made(*given.args, **given.kwargs)
        _name_as_asked(torchs, group, asked)
        return group, store

    torchs._new_process_group_helper = make


def _has_gpus_too(asked: str, backends: Mapping[str, str], rank: int) -> bool:
    """Return whether a group has another backend for GPUs: ours cannot be combined with it."""
    import torch

    if set(backends.values()) == {GLOO} or not torch.cuda.is_available():
        return False
    if rank == 0:
        say(
            f'the process group "{asked}" combines gloo with a backend for GPUs and stays on '
            f"gloo: `--backend {NAME}` replaces gloo only where it is alone."
        )
    return True


def _name_as_asked(torchs: Any, group: Any, asked: str) -> None:
    """Have torch report the backend that the program asked for."""
    from unisono.c10d.group import Group

    if not isinstance(group, Group):
        return  # this rank is no member
    group.backend_name = GLOO
    _, store = torchs._world.pg_map[group]
    torchs._world.pg_map[group] = (asked, store)
    torchs._world.pg_backend_config[group] = str(torchs.BackendConfig(asked))

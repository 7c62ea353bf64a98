"""Who answers where a program asks torch for gloo? Our backend, if the user has said so.

Libraries know "gloo" as the backend for CPUs and refuse or treat differently what they do not
know: Accelerate, transformers and Lightning compare names. So a group that was asked for as gloo
is made by our backend, and torch goes on telling the name that was asked for. It is the same
:class:`~unisono.c10d.group.Group` that ``init_process_group("unisono")`` makes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from unisono.c10d.registration import NAME
from unisono.words import say

GLOO = "gloo"
BACKENDS = (GLOO, NAME)


def check_backend(option: str, name: object) -> None:
    """Refuse what `unisono run --backend` and ``launch(backend=)`` do not know.

    Raises:
        ValueError: it is neither "gloo" nor "unisono".
    """
    if name not in BACKENDS:
        raise ValueError(
            f"`{option}` must be {GLOO} or {NAME}, but is {name!r}: pass {NAME!r} to have process "
            f"groups that the program asks of gloo made by Unisono's backend."
        )


def replace_gloo(rank: int) -> None:
    """Have our backend make every group of this process that is asked of gloo from now on.

    Process groups of forks of this process are ours, too; other child processes have torch's gloo.

    Args:
        rank: rank 0 says for all if something is left to gloo.
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
    """Tell a group that must move GPUs' tensors with another backend: ours cannot be joined."""
    import torch

    if set(backends.values()) == {GLOO} or not torch.cuda.is_available():
        return False
    if rank == 0:
        say(
            f'"{asked}" joins gloo with a backend for GPUs, so gloo moves its CPU tensors: '
            f"`--backend {NAME}` is for groups of gloo alone."
        )
    return True


def _name_as_asked(torchs: Any, group: Any, asked: str) -> None:
    """Have torch tell of a group what the program has asked for."""
    from unisono.c10d.group import Group

    if not isinstance(group, Group):
        return  # this rank is no member
    group.backend_name = GLOO
    _, store = torchs._world.pg_map[group]
    torchs._world.pg_map[group] = (asked, store)
    torchs._world.pg_backend_config[group] = str(torchs.BackendConfig(asked))

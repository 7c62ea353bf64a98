"""Registers the backend with torch, whichever of torch and Unisono is imported first.

torch keeps its backends in ``torch.distributed.distributed_c10d``. The backend is registered once
that module is imported. This module does not import torch, because the launcher never loads it. The
backend's code is loaded when the first group is created.

It can also replace gloo, for libraries that accept only the name "gloo" on CPUs: Accelerate,
transformers and Lightning compare the backend's name with the names they know. So our backend
creates the gloo groups, and ``get_backend()`` still returns the requested name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, final

from unisono.runtime.notices import say

NAME = "unisono"
_WHERE_TORCH_KEEPS_BACKENDS = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register ``init_process_group("unisono")`` with torch, now or when torch is imported."""
    if not _register_if_imported() and not any(isinstance(one, _Waiting) for one in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


@final
class _Waiting(MetaPathFinder):
    """Finds nothing: registers the backend at the first import behind that of torch's module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Return None, so that the other finders are asked."""
        if _register_if_imported():  # another list, as torch's import is going through this one
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


def _register_if_imported() -> bool:
    """Register the backend if torch's module is imported; return whether it is."""
    module = sys.modules.get(_WHERE_TORCH_KEEPS_BACKENDS)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return False
    if hasattr(module, "Backend"):  # torch has process groups
        _register_in(module)
    return True


def _register_in(module: ModuleType) -> None:
    if NAME not in module.Backend.backend_list:
        module.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # torch 2.15 attaches a recorder to the other backends, which needs a group made in C++.
        recording_themselves: set[str] = getattr(module, "_FR_SELF_RECORDING_BACKENDS", set())
        recording_themselves.add(NAME)


def _create(options: Any, backend_options: object) -> Any:
    from unisono.runtime.c10d.group import create

    return create(options, backend_options)


GLOO = "gloo"
BACKENDS = (GLOO, NAME)


def check_backend(name: object) -> None:
    """Check the argument of ``unisono run --backend`` or ``launch(backend=)``."""
    if name not in BACKENDS:
        raise ValueError(
            f"`--backend` or `backend` must be {GLOO} or {NAME}, but is {name!r}: pass {NAME!r} to "
            f"run the program's gloo groups on Unisono's backend."
        )


def on_our_backend(rank: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes torch's function create gloo groups on our backend.

    This applies to forks of the process as well; processes that it spawns use torch's gloo. Rank 0
    reports groups that stay on gloo.
    """

    def ours(made: Callable[..., Any]) -> Callable[..., Any]:
        from torch.distributed import distributed_c10d as torchs

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

        return make

    return ours


def _has_gpus_too(asked: str, backends: Mapping[str, str], rank: int) -> bool:
    """Return whether a group has another backend for GPUs: ours cannot be combined with one."""
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
    from unisono.runtime.c10d.group import Group

    if not isinstance(group, Group):
        return  # this rank is not a member
    group.backend_name = GLOO
    _, store = torchs._world.pg_map[group]
    torchs._world.pg_map[group] = (asked, store)
    torchs._world.pg_backend_config[group] = str(torchs.BackendConfig(asked))

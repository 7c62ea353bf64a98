"""Registers the backend with torch, whichever of torch and Unisono is imported first.

torch keeps its backends in ``torch.distributed.distributed_c10d``. Once that module is imported,
the backend is registered; this does not import it, as the launcher never loads torch. The
backend's own code is loaded when the first group is made.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "unisono"
_WHERE_TORCH_KEEPS_BACKENDS = "torch.distributed.distributed_c10d"


def register() -> None:
    """Make ``init_process_group("unisono")`` known to torch, now or when torch is imported."""
    module = sys.modules.get(_WHERE_TORCH_KEEPS_BACKENDS)
    if module is not None and hasattr(module, "Backend"):
        _register_in(module)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Has the other finders find one module, once, and registers the backend in it. Final."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torch's module, with the registration after its execution."""
        if name != _WHERE_TORCH_KEEPS_BACKENDS:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader: Any) -> None:
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        _register_in(module)

    loader.exec_module = execute_and_register  # on this one loader of this one module, once


def _register_in(module: ModuleType) -> None:
    if NAME not in module.Backend.backend_list:
        module.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: object) -> Any:
    from unisono.c10d.group import create

    return create(options, backend_options)

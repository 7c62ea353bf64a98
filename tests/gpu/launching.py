"""Starting workers that share one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gpu.devices import CUDA

import unisono


def launch(function: Callable[..., Any], *args: Any, workers: int, device: str, **more: Any) -> Any:
    """Call a function on workers that share a device; returns what each of them said."""
    where: dict[str, Any] = {"workers_per_gpu": workers} if device == CUDA else {"gpus": "none"}
    return unisono.launch(function, *args, workers=workers, **where, **more)

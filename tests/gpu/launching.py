"""Starting workers that share one device, from a test and as a user does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import unisono


def sharing(device: str, workers: int) -> dict[str, Any]:
    """Say how many workers a GPU has, where workers share one."""
    return {"workers_per_gpu": workers} if device == "cuda" and workers > 1 else {}


def launch(function: Callable[..., Any], *args: Any, workers: int, device: str, **more: Any) -> Any:
    """Call a function on workers that share a device; returns what each of them said."""
    return unisono.launch(function, *args, workers=workers, **sharing(device, workers), **more)


def flags(device: str, workers: int) -> tuple[str, ...]:
    """Give the same as flags of ``unisono run``."""
    return ("--workers-per-gpu", str(workers)) if device == "cuda" and workers > 1 else ()

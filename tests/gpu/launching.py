"""Starting workers that share one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.gpu.devices import CUDA

import unisono


def launch(function: Callable[..., Any], *args: Any, workers: int, device: str, **more: Any) -> Any:
    """Call a function on workers that share a device; returns what each of them said."""
    if device == CUDA:
        return unisono.launch(function, *args, workers=workers, workers_per_gpu=workers, **more)
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        return unisono.launch(function, *args, workers=workers, **more)

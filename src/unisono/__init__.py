"""Data-parallel training for PyTorch whose result does not depend on how many workers computed it.

The public names, nothing else. Those that need torch are loaded when they are first used, so that
the launcher, which never computes, does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono import errors
from unisono.errors import UnisonoError
from unisono.runtime import __version__
from unisono.runtime.c10d.registration import register as _register_backend
from unisono.runtime.habits import missing as _missing
from unisono.runtime.launch.api import launch
from unisono.runtime.world import world

if TYPE_CHECKING:
    from unisono import callbacks as callbacks
    from unisono import data as data
    from unisono import distributed as distributed
    from unisono.data.share import share
    from unisono.distributed.data_parallel import DataParallel
    from unisono.engine.splitting.split import split
    from unisono.engine.state.load import load_weights
    from unisono.runtime.training_progress import progress
    from unisono.training.loss_function import WholeBatch, token_mean
    from unisono.training.options import Checkpoint, Precision, Schedule
    from unisono.training.run import Run
    from unisono.training.trainer import Trainer

_register_backend()

_LOADED_ON_FIRST_USE = {
    "Checkpoint": "unisono.training.options",
    "DataParallel": "unisono.distributed.data_parallel",
    "Precision": "unisono.training.options",
    "Run": "unisono.training.run",
    "Schedule": "unisono.training.options",
    "Trainer": "unisono.training.trainer",
    "WholeBatch": "unisono.training.loss_function",
    "load_weights": "unisono.engine.state.load",
    "progress": "unisono.runtime.training_progress",
    "share": "unisono.data.share",
    "split": "unisono.engine.splitting.split",
    "token_mean": "unisono.training.loss_function",
}
_ROOMS = ("callbacks", "data", "distributed")

__all__ = [
    "Checkpoint",
    "DataParallel",
    "Precision",
    "Run",
    "Schedule",
    "Trainer",
    "UnisonoError",
    "WholeBatch",
    "__version__",
    "callbacks",
    "data",
    "distributed",
    "errors",
    "launch",
    "load_weights",
    "progress",
    "share",
    "split",
    "token_mean",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"unisono.{name}")
    if name not in _LOADED_ON_FIRST_USE:
        raise _missing("module 'unisono'", name)
    return getattr(importlib.import_module(_LOADED_ON_FIRST_USE[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Data-parallel training for PyTorch whose result does not depend on how many workers computed it.

The public names, nothing else. Those that need torch are loaded when they are first used, so that
the launcher, which never computes, does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    CallbackError,
    CheckpointError,
    DataFormatError,
    DownloadError,
    LoadingError,
    MismatchError,
    NondeterministicError,
    NonFiniteLossError,
    OutOfMemoryError,
    PeerLostError,
    RendezvousError,
    UnisonoError,
    WaitTimeoutError,
    WorkerError,
)
from unisono.runtime import __version__
from unisono.runtime.c10d.registration import register as _register_backend
from unisono.runtime.launch.api import launch
from unisono.runtime.workers.context import context
from unisono.runtime.workers.launcher_messages import Ready
from unisono.runtime.world import World, world

if TYPE_CHECKING:
    from unisono import callbacks as callbacks
    from unisono import data as data
    from unisono.data.share import share
    from unisono.distributed.data_parallel import DataParallel
    from unisono.distributed.distributed_sampler import DistributedSampler
    from unisono.distributed.init import init
    from unisono.distributed.module import DistributedDataParallel
    from unisono.engine.splitting.split import split
    from unisono.engine.state.load import load_model
    from unisono.runtime.training_progress import progress
    from unisono.training.loss_function import token_mean
    from unisono.training.run import Run
    from unisono.training.step import Step
    from unisono.training.trainer import Trainer

_register_backend()

_LOADED_ON_FIRST_USE = {
    "DataParallel": "unisono.distributed.data_parallel",
    "DistributedDataParallel": "unisono.distributed.module",
    "DistributedSampler": "unisono.distributed.distributed_sampler",
    "Run": "unisono.training.run",
    "Step": "unisono.training.step",
    "Trainer": "unisono.training.trainer",
    "init": "unisono.distributed.init",
    "load_model": "unisono.engine.state.load",
    "progress": "unisono.runtime.training_progress",
    "share": "unisono.data.share",
    "split": "unisono.engine.splitting.split",
    "token_mean": "unisono.training.loss_function",
}

__all__ = [
    "CallbackError",
    "CheckpointError",
    "DataFormatError",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "DownloadError",
    "LoadingError",
    "MismatchError",
    "NonFiniteLossError",
    "NondeterministicError",
    "OutOfMemoryError",
    "PeerLostError",
    "RendezvousError",
    "Run",
    "Step",
    "Trainer",
    "UnisonoError",
    "WaitTimeoutError",
    "WorkerError",
    "World",
    "__version__",
    "data",
    "init",
    "launch",
    "load_model",
    "progress",
    "share",
    "split",
    "token_mean",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "data"):
        return importlib.import_module(f"unisono.{name}")
    if name not in _LOADED_ON_FIRST_USE:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    if name in ("Run", "Trainer", "share"):
        # The program trains with Unisono: a worker that is killed from here on is replaced.
        context().supervisor.tell(Ready())
    return getattr(importlib.import_module(_LOADED_ON_FIRST_USE[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "callbacks", "data"])

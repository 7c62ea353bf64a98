"""Data-parallel training for PyTorch whose result does not depend on how many workers computed it.

The public names, nothing else. Those that need torch are loaded when they are first used, so that
the launcher, which never computes, does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.c10d.registration import register as _register_backend
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
from unisono.launch.api import launch
from unisono.version import __version__
from unisono.workers.context import context
from unisono.workers.launcher_messages import Ready
from unisono.world import World, world

if TYPE_CHECKING:
    from unisono import callbacks as callbacks
    from unisono import data as data
    from unisono.data.share import share
    from unisono.data_parallel.data_parallel import DataParallel
    from unisono.ddp.distributed_sampler import DistributedSampler
    from unisono.ddp.init import init
    from unisono.ddp.module import DistributedDataParallel
    from unisono.splitting.split import split
    from unisono.state.load import load_model
    from unisono.train.run import Run
    from unisono.train.step import Step
    from unisono.train.token_mean import token_mean
    from unisono.train.trainer import Trainer
    from unisono.training_progress import progress

_register_backend()

_LOADED_ON_FIRST_USE = {
    "DataParallel": "unisono.data_parallel.data_parallel",
    "DistributedDataParallel": "unisono.ddp.module",
    "DistributedSampler": "unisono.ddp.distributed_sampler",
    "Run": "unisono.train.run",
    "Step": "unisono.train.step",
    "Trainer": "unisono.train.trainer",
    "init": "unisono.ddp.init",
    "load_model": "unisono.state.load",
    "progress": "unisono.training_progress",
    "share": "unisono.data.share",
    "split": "unisono.splitting.split",
    "token_mean": "unisono.train.token_mean",
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

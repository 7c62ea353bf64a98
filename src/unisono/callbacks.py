"""Callbacks: progress, files, averages, decisions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.runtime.habits import missing as _missing

if TYPE_CHECKING:
    from unisono.training.callbacks.best_validation import BestCheckpoint as BestCheckpoint
    from unisono.training.callbacks.callback import Callback as Callback
    from unisono.training.callbacks.callback import DoneStep as DoneStep
    from unisono.training.callbacks.callback import Fit as Fit
    from unisono.training.callbacks.callback import Times as Times
    from unisono.training.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from unisono.training.callbacks.ema import EMA as EMA
    from unisono.training.callbacks.event_log import EventLog as EventLog
    from unisono.training.callbacks.progress import Progress as Progress
    from unisono.training.callbacks.ray_train import RayTrain as RayTrain
    from unisono.training.callbacks.trackers import MLflow as MLflow
    from unisono.training.callbacks.trackers import TensorBoard as TensorBoard
    from unisono.training.callbacks.trackers import WandB as WandB

# Loaded when they are first used: the launcher draws in notebooks, but has no need of torch.
_HOMES = {
    "BestCheckpoint": "best_validation",
    "Callback": "callback",
    "DoneStep": "callback",
    "EMA": "ema",
    "EarlyStopping": "early_stopping",
    "EventLog": "event_log",
    "Fit": "callback",
    "MLflow": "trackers",
    "Progress": "progress",
    "RayTrain": "ray_train",
    "TensorBoard": "trackers",
    "Times": "callback",
    "WandB": "trackers",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise _missing("module 'unisono.callbacks'", name)
    return getattr(importlib.import_module(f"unisono.training.callbacks.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""Sends numbers to Weights & Biases, each step once."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from unisono.callbacks.logger import Logger
from unisono.callbacks.logger_feed import Opening, Row, Sender

_MODES = ("offline", "online")


class WandB(Logger):
    """Sends numbers to Weights & Biases; needs ``pip install 'unisono[wandb]'``. Final.

    Names are those of :class:`TensorBoard`. Nothing leaves the machine unless you ask for it:
    ``wandb sync`` uploads what an offline run has written. A run that is resumed, or whose worker
    was killed, continues the same W&B run; each continuation of an offline run is a folder of its
    own, and ``wandb sync`` joins them.

    Args:
        project: the W&B project.
        mode: ``"offline"`` or ``"online"``; None: what ``WANDB_MODE`` says, else offline.
        config: hyperparameters, in addition to batch size, shards, seed and the optimizer's.
        path: the folder; None: ``wandb`` in the run directory.
        every: of how many steps one is sent.
        options: more of ``wandb.init``, such as ``name``, ``entity``, ``tags``, ``group``.

    Raises:
        TypeError: `every` is not a whole number; `config` or an option cannot be JSON.
        ValueError: `every` is too small, `mode` is something else.
        ModuleNotFoundError: ``wandb`` is not installed.
    """

    product, package, home = "Weights & Biases", "wandb", "wandb_run"

    def __init__(
        self,
        project: str = "unisono",
        *,
        mode: str | None = None,
        config: Mapping[str, Any] | None = None,
        path: str | os.PathLike[str] | None = None,
        every: int = 1,
        **options: Any,
    ) -> None:
        if mode is not None and mode not in _MODES:
            raise ValueError(f"`mode` must be one of {_MODES}, but is {mode!r}.")
        mode = mode or os.environ.get("WANDB_MODE") or "offline"
        settings = {"project": project, "mode": mode, **options}
        super().__init__(settings, config, path, every)


class _Run:
    def __init__(self, opening: Opening) -> None:
        settings, run_id = opening.settings, opening.run_id
        if settings["mode"] != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # which would go over the network
        wandb = importlib.import_module("wandb")
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, disable_job_creation=True
        )
        given = {"resume": "allow"} if settings["mode"] == "online" else {}
        path = opening.path
        self._run = wandb.init(
            dir=path.parent if path.name == "wandb" else path,  # it makes a folder `wandb` there
            id=run_id or secrets.token_hex(8),
            config=opening.config if run_id is None else None,
            settings=quiet,
            **{**given, **settings},
        )
        self.run_id = str(self._run.id)

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log(row.values, step=row.step)

    def end(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("finished", "") else 1)


def begin(opening: Opening) -> Sender:
    """Open a run, in the process of the loggers."""
    return Sender(opening, _Run)

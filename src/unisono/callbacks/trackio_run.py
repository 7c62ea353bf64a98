"""Sends numbers to Trackio, each step once."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from unisono.callbacks.logger import Logger
from unisono.callbacks.logger_feed import Opening, Row, Sender


class Trackio(Logger):
    """Sends numbers to Trackio; needs ``pip install 'unisono[trackio]'``. Final.

    Names are those of :class:`TensorBoard`. Nothing leaves the machine unless `options` have
    ``space_id`` or ``server_url``. A run that is resumed, or whose worker was killed, continues the
    same Trackio run. ``TRACKIO_DIR=runs/mine/trackio trackio show`` shows it.

    Args:
        project: the Trackio project.
        config: hyperparameters, in addition to batch size, shards, seed and the optimizer's.
        path: the folder; None: ``trackio`` in the run directory.
        every: of how many steps one is sent.
        options: more of ``trackio.init``, such as ``space_id`` or ``group``.

    Raises:
        TypeError: `every` is not a whole number; `config` or an option cannot be JSON.
        ValueError: `every` is too small.
        ModuleNotFoundError: ``trackio`` is not installed.
    """

    product, package, home = "Trackio", "trackio", "trackio_run"

    def __init__(
        self,
        project: str = "unisono",
        *,
        config: Mapping[str, Any] | None = None,
        path: str | os.PathLike[str] | None = None,
        every: int = 1,
        **options: Any,
    ) -> None:
        super().__init__({"project": project, **options}, config, path, every)


class _Run:
    def __init__(self, opening: Opening) -> None:
        settings, run_id = opening.settings, opening.run_id
        os.environ["TRACKIO_DIR"] = str(opening.path)
        if not settings.get("space_id"):
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
            os.environ["HF_HUB_OFFLINE"] = "1"
        self._run = importlib.import_module("trackio").init(
            **{
                "name": run_id or f"{settings['project']}-{secrets.token_hex(4)}",
                "resume": "allow" if run_id else "never",
                "config": opening.config,
                "embed": False,
                "auto_log_gpu": False,
                "auto_log_cpu": False,
                **settings,
            }
        )
        self.run_id = str(self._run.name)

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log(row.values, step=row.step)

    def end(self, status: str) -> None:
        self._run.finish()


def begin(opening: Opening) -> Sender:
    """Open a run, in the process of the loggers."""
    return Sender(opening, _Run)

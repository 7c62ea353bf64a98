"""Sends numbers to MLflow, each step once."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.callbacks.logger import Logger
from unisono.callbacks.logger_feed import Opening, Row, Sender

# Of one call: MLflow refuses more.
_METRICS_AT_MOST, _PARAMS_AT_MOST = 1000, 100
_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflow(Logger):
    """Sends numbers to MLflow; needs ``pip install 'unisono[mlflow]'``. Final.

    Names are those of :class:`TensorBoard`. A run that is resumed, or whose worker was killed,
    continues the same MLflow run. ``mlflow ui --backend-store-uri sqlite:///runs/mine/mlflow/mlflow.db``
    shows it; it needs the whole of MLflow, ``pip install mlflow``.

    Args:
        experiment: its name; it is created if need be.
        run_name: the run's name; None: MLflow chooses one.
        tracking_uri: a server or a database; None: ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in
            `path`.
        tags: of the run.
        config: hyperparameters, in addition to batch size, shards, seed and the optimizer's.
        path: the folder; None: ``mlflow`` in the run directory.
        every: of how many steps one is sent.

    Raises:
        TypeError: `every` is not a whole number; `config` or `tags` cannot be JSON.
        ValueError: `every` is too small.
        ModuleNotFoundError: ``mlflow`` is not installed.
    """

    product, package, home = "MLflow", "mlflow", "mlflow_run"

    def __init__(
        self,
        experiment: str = "unisono",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        path: str | os.PathLike[str] | None = None,
        every: int = 1,
    ) -> None:
        settings = {
            "experiment": experiment,
            "run_name": run_name,
            "tracking_uri": tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"),
            "tags": dict(tags or {}),
        }
        super().__init__(settings, config, path, every)


class _Run:
    def __init__(self, opening: Opening) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # which goes over the network
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        database = f"sqlite:///{Path(opening.path, 'mlflow.db').absolute()}"
        uri = opening.settings["tracking_uri"] or database
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self.run_id = opening.run_id or self._created(opening)
        if opening.run_id:
            self._client.update_run(self.run_id, status="RUNNING")

    def log(self, rows: list[Row]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(row.time_unix_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for at in range(0, len(metrics), _METRICS_AT_MOST):
            some = metrics[at : at + _METRICS_AT_MOST]
            self._client.log_batch(self.run_id, metrics=some)

    def end(self, status: str) -> None:
        if status:
            self._client.set_terminated(self.run_id, _ENDS[status])

    def _created(self, opening: Opening) -> str:
        settings = opening.settings
        found = self._client.get_experiment_by_name(settings["experiment"])
        experiment = found.experiment_id if found else self._new_experiment(opening)
        run = self._client.create_run(
            experiment, run_name=settings["run_name"], tags=settings["tags"]
        )
        params = [self._entities.Param(name, str(value)) for name, value in opening.config.items()]
        for at in range(0, len(params), _PARAMS_AT_MOST):
            self._client.log_batch(run.info.run_id, params=params[at : at + _PARAMS_AT_MOST])
        return str(run.info.run_id)

    def _new_experiment(self, opening: Opening) -> Any:
        # Else in the working folder, whatever that is.
        is_remote = opening.settings["tracking_uri"]
        place = None if is_remote else Path(opening.path, "artifacts").absolute().as_uri()
        name = opening.settings["experiment"]
        return self._client.create_experiment(name, artifact_location=place)


def begin(opening: Opening) -> Sender:
    """Open a run, in the process of the loggers."""
    return Sender(opening, _Run)

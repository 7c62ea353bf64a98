"""Sends numbers to MLflow, each step once."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.callbacks.logger_process import Row
from unisono.callbacks.tracking import Tracker

# Of one call: MLflow refuses more.
_METRICS_AT_MOST, _PARAMS_AT_MOST = 1000, 100
_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflow(Tracker):
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

    product, module = "MLflow", "mlflow"

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
    def __init__(self, client: Any, run_id: str, entities: Any) -> None:
        self._client, self.run_id, self._entities = client, run_id, entities

    def log(self, rows: list[Row]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name, value, now_ms, row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for at in range(0, len(metrics), _METRICS_AT_MOST):
            some = metrics[at : at + _METRICS_AT_MOST]
            self._client.log_batch(self.run_id, metrics=some)

    def end(self, status: str) -> None:
        if status:
            self._client.set_terminated(self.run_id, _ENDS[status])


def begin(
    folder: str, settings: dict[str, Any], config: dict[str, Any], run_id: str | None
) -> _Run:
    """Open a run, in the process of the logger: see :class:`LoggerRun`."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # which goes over the network
    mlflow = importlib.import_module("mlflow")
    entities = importlib.import_module("mlflow.entities")
    uri = settings["tracking_uri"] or f"sqlite:///{Path(folder, 'mlflow.db').absolute()}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    if run_id is not None:
        client.update_run(run_id, status="RUNNING")
        return _Run(client, run_id, entities)
    found = client.get_experiment_by_name(settings["experiment"])
    experiment = found.experiment_id if found else _new_experiment(client, settings, folder)
    run = client.create_run(experiment, run_name=settings["run_name"], tags=settings["tags"])
    params = [entities.Param(name, str(value)) for name, value in config.items()]
    for at in range(0, len(params), _PARAMS_AT_MOST):
        client.log_batch(run.info.run_id, params=params[at : at + _PARAMS_AT_MOST])
    return _Run(client, run.info.run_id, entities)


def _new_experiment(client: Any, settings: dict[str, Any], folder: str) -> Any:
    # Else in the working folder, whatever that is.
    place = None if settings["tracking_uri"] else Path(folder, "artifacts").absolute().as_uri()
    return client.create_experiment(settings["experiment"], artifact_location=place)

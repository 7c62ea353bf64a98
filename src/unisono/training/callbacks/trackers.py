"""Send numbers to TensorBoard, Weights & Biases and MLflow, each step once."""

from __future__ import annotations

import importlib
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from unisono.training.callbacks.logger import Logger
from unisono.training.callbacks.logger_feed import Opening, Row

_WANDB_MODES = ("offline", "online")
_METRICS_AT_MOST, _PARAMS_AT_MOST = 1000, 100  # per call: MLflow refuses more
_plain = partial(re.compile(r"[^\w.\- :/]").sub, "_")  # MLflow refuses a name such as `top@5`


def _plain_names(values: Mapping[str, float]) -> Mapping[str, float]:
    plain = {_plain(name): value for name, value in values.items()}
    if len(plain) < len(values):
        raise ValueError(
            f"names must differ where `_` stands for what MLflow refuses, but of {[*values]} some "
            f"become the same: rename one of them"
        )
    return plain


_MLFLOW_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class _TensorBoardRun:
    run_id = "tensorboard"

    def __init__(self, opening: Opening) -> None:
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        records = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._event, self._summary = events.Event, summaries.Summary
        # Files are read in the order of their names. A symbolic link of that name would be
        # followed, so the name cannot be guessed.
        unique = f"{time.time_ns()}.{socket.gethostname()}.{secrets.token_hex(8)}"
        self._records = records.RecordWriter(
            (opening.path / f"events.out.tfevents.{unique}").open("xb")
        )
        begun = {"wall_time": time.time(), "step": 0}
        self._write(**begun, file_version="brain.Event:2")
        if opening.run_id is None:  # forget the files of another run
            self._write(**begun, session_log=events.SessionLog(status=events.SessionLog.START))

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            named = row.values.items()
            summary = self._summary(
                value=[self._summary.Value(tag=n, simple_value=v) for n, v in named]
            )
            self._write(wall_time=row.time_unix_s, step=row.step, summary=summary)
        self._records.flush()

    def end(self, status: str) -> None:
        self._records.close()

    def _write(self, **facts: Any) -> None:
        self._records.write(self._event(**facts).SerializeToString())


@final
class TensorBoard(Logger):
    """Writes scalars for TensorBoard; needs ``pip install 'unisono[tensorboard]'``.

    It writes ``train/loss`` and the other means, ``learning_rate`` and ``gradient_norm`` of steps,
    counted from 0, and ``validation/loss`` and so on at the step that was done last.

    Args:
        path: the folder; None: ``tensorboard`` in the run directory.
        every: write one of so many steps.

    Raises:
        TypeError, ValueError: `every` is not an integer of at least 1.
        ModuleNotFoundError: TensorBoard is not installed.
    """

    product, package, opens = "TensorBoard", "tensorboard", _TensorBoardRun

    def __init__(self, path: str | os.PathLike[str] | None = None, *, every: int = 1) -> None:
        super().__init__({}, None, path, every)


class _WandBRun:
    def __init__(self, opening: Opening) -> None:
        settings, run_id = opening.settings, opening.run_id
        if settings["mode"] != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # it uses the network
        wandb = importlib.import_module("wandb")
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, disable_job_creation=True
        )
        given = {"resume": "allow"} if settings["mode"] == "online" else {}
        path = opening.path
        self._run = wandb.init(
            dir=path.parent if path.name == "wandb" else path,  # it creates a folder `wandb` there
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


@final
class WandB(Logger):
    """Sends numbers to Weights & Biases; needs ``pip install 'unisono[wandb]'``.

    Names are those of :class:`TensorBoard`. Nothing leaves the machine unless you ask for it:
    ``wandb sync`` uploads what an offline run has written. A run that is resumed, or whose worker
    was killed, continues the same W&B run; each continuation of an offline run is a separate
    folder, and ``wandb sync`` joins them.

    Args:
        project: the W&B project.
        mode: ``"offline"`` or ``"online"``; None: the value of ``WANDB_MODE``, or else offline.
        config: hyperparameters, in addition to batch size, shards, seed and the optimizer's.
        path: the folder; None: one of the logger's name in the run directory.
        every: send one of so many steps.
        options: other options of ``wandb.init``, such as ``name``, ``entity``, ``tags``, ``group``.

    Raises:
        TypeError, ValueError: JSON cannot hold `config` or an option, `mode` is something else, or
            `every` is not an integer of at least 1.
        ModuleNotFoundError: ``wandb`` is not installed.
    """

    product, package, opens = "Weights & Biases", "wandb", _WandBRun

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
        if mode is not None and mode not in _WANDB_MODES:
            raise ValueError(f"`mode` must be one of {_WANDB_MODES}, but is {mode!r}.")
        mode = mode or os.environ.get("WANDB_MODE") or "offline"
        settings = {"project": project, "mode": mode, **options}
        super().__init__(settings, config, path, every)


class _MLflowRun:
    def __init__(self, opening: Opening) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it uses the network
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
            for name, value in _plain_names(row.values).items()
        ]
        for at in range(0, len(metrics), _METRICS_AT_MOST):
            some = metrics[at : at + _METRICS_AT_MOST]
            self._client.log_batch(self.run_id, metrics=some)

    def end(self, status: str) -> None:
        if status:
            self._client.set_terminated(self.run_id, _MLFLOW_ENDS[status])

    def _created(self, opening: Opening) -> str:
        settings, name = opening.settings, opening.settings["experiment"]
        if found := self._client.get_experiment_by_name(name):
            experiment = found.experiment_id
        else:
            # Otherwise artifacts would go to the working directory.
            here = Path(opening.path, "artifacts").absolute().as_uri()
            place = None if settings["tracking_uri"] else here
            experiment = self._client.create_experiment(name, artifact_location=place)
        run = self._client.create_run(
            experiment, run_name=settings["run_name"], tags=settings["tags"]
        )
        params = [self._entities.Param(_plain(n), str(v)) for n, v in opening.config.items()]
        for at in range(0, len(params), _PARAMS_AT_MOST):
            self._client.log_batch(run.info.run_id, params=params[at : at + _PARAMS_AT_MOST])
        return str(run.info.run_id)


@final
class MLflow(Logger):
    """Sends numbers to MLflow; needs ``pip install 'unisono[mlflow]'``.

    Names are those of :class:`TensorBoard`, with ``_`` for characters that MLflow refuses; the
    arguments not listed here are those of :class:`WandB`. A run that is resumed, or whose worker
    was killed, continues the same MLflow run.
    ``mlflow ui --backend-store-uri sqlite:///runs/mine/mlflow/mlflow.db`` shows it; it needs the
    full MLflow, ``pip install mlflow``.

    Args:
        experiment: its name; it is created if it does not exist.
        run_name: the run's name; None: MLflow chooses one.
        tracking_uri: a server or a database; None: ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in
            `path`.
        tags: the run's tags.
    """

    product, package, opens = "MLflow", "mlflow", _MLflowRun

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

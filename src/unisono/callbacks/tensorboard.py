"""Writes curves for TensorBoard, each step once."""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from unisono.callbacks.logger import Logger
from unisono.callbacks.logger_feed import Opening, Row, Sender


class TensorBoard(Logger):
    """Writes scalars that TensorBoard shows; needs ``pip install 'unisono[tensorboard]'``. Final.

    ``train/loss`` and the other means, ``learning_rate``, ``gradient_norm`` of steps, counted from
    0; ``validation/loss`` and so on at the step that was done last. If a run is resumed from an
    earlier step, TensorBoard forgets the steps that come again.

    Args:
        path: the folder; None: ``tensorboard`` in the run directory.
        every: of how many steps one is written.

    Raises:
        TypeError: `every` is not a whole number.
        ValueError: `every` is too small.
        ModuleNotFoundError: TensorBoard is not installed.
    """

    product, package, home = "TensorBoard", "tensorboard", "tensorboard"

    def __init__(self, path: str | os.PathLike[str] | None = None, *, every: int = 1) -> None:
        super().__init__({}, None, path, every)


class _Curves:
    """A file that replaces what others in the folder say of the first step to come and later."""

    run_id = "tensorboard"

    def __init__(self, opening: Opening) -> None:
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        records = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._event, self._summary = events.Event, summaries.Summary
        self._records = records.RecordWriter(_new_file(opening.path))
        begun = {"wall_time": time.time(), "step": opening.first}
        self._write(**begun, file_version="brain.Event:2")
        log = events.SessionLog(status=events.SessionLog.START)
        self._write(**begun, session_log=log)

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            values = [
                self._summary.Value(tag=tag, simple_value=value)
                for tag, value in row.values.items()
            ]
            summary = self._summary(value=values)
            self._write(wall_time=row.time_unix_s, step=row.step, summary=summary)
        self._records.flush()

    def end(self, status: str) -> None:
        self._records.close()

    def _write(self, **facts: Any) -> None:
        self._records.write(self._event(**facts).SerializeToString())


def begin(opening: Opening) -> Sender:
    """Begin a file, in the process of the loggers."""
    return Sender(opening, _Curves, forgets=True)


def _new_file(folder: Path) -> Any:
    """Create a file whose name comes after those of others, in whose order they are read."""
    while any(folder.glob(f"events.out.tfevents.{(now_s := int(time.time())):010d}.*")):
        time.sleep(0.1)
    # A link of that name would be followed: nobody can know the name beforehand.
    name = f"events.out.tfevents.{now_s:010d}.{socket.gethostname()}.{secrets.token_hex(8)}"
    return (folder / name).open("xb")

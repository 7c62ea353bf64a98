"""Loggers: TensorBoard, W&B and MLflow receive what the event file contains.

::

    leader ──► event file ──► one process: EventReader ──► Sender ──► files and servers of loggers
       ├── settings, end of `fit` ──────►│                 (a thread for each logger)
       │◄── a line for each that fails ──┘

Training writes the event file and nothing else, so a logger that fails, hangs or prints cannot
disturb it, and the file's guarantee holds for loggers: each step once, whichever worker is lost. A
thread of the leader would die with it, and so would what W&B has accepted but not yet written. If
the leader is lost, its process sends the rest of the file and ends; the next leader starts another
process, which waits for that end and continues the same runs of the loggers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, final

from typing_extensions import override

from unisono.runtime.notices import shown
from unisono.runtime.plainfile import check_own_folder, check_plain, path_given
from unisono.runtime.procfs import OUTLIVES
from unisono.runtime.timeouts import LOGGER
from unisono.runtime.whole import check_whole
from unisono.training.callbacks.callback import Callback, DoneStep, Fit
from unisono.training.callbacks.event_log import EventLog
from unisono.training.callbacks.journal import path_of, say_alone, trouble_at
from unisono.training.callbacks.logger_feed import RUN_FILE, LoggerRun, no_numbers
from unisono.training.callbacks.summary import Summary

_LOOK_EVERY_S = 1.0
_FAIL_WITHIN_S = 5.0  # after an exception or Ctrl-C: the launcher does not wait long
_GRACE_S = 5.0  # beyond the time that the process has to end
_CHUNK_BYTES = 1 << 16
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "sys.argv[1] in sys.path or sys.path.append(sys.argv[1]); "
    "from unisono.training.callbacks.logger_feed import main; main()"
)
_FACTS = ("batch_size", "shards", "seed", "world_size", "num_samples", "num_parameters")


class Logger(Callback):
    """Sends the numbers of each step to a logger, once. Abstract.

    Attributes:
        product: the name in messages.
        package: the package to install; also the name of the extra and of the folder.
        opens: the class of its run, in the process of the loggers.
        path: where it writes in the current call of ``fit``.
    """

    product: ClassVar[str]
    package: ClassVar[str]
    opens: ClassVar[type[LoggerRun]]

    def __init__(
        self,
        settings: Mapping[str, Any],
        config: Mapping[str, Any] | None,
        path: str | os.PathLike[str] | None,
        every: int = 1,
    ) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise ModuleNotFoundError(
                f"{self.product} must be installed to take numbers, but is not: "
                f"`pip install 'unisono[{self.package}]'`."
            )
        self._settings = _as_json("options", settings)
        self._config = _as_json("config", config or {})
        self._given = None if path is None else path_given(path)
        self._every = check_whole("every", every, at_least=1)
        LOGGER.in_s()  # reports a wrong variable before training
        self.path = Path()

    @override
    def writes_to(self, directory: Path | None) -> Path | None:
        return self._given or (directory and directory / self.package)

    def on_begin(self, fit: Fit) -> None:
        """Raise if something is in the way of the logger's files."""
        self.path = path_of(self, fit, f"{self.product} writes", f'{self.name}(path="runs/mine")')
        if fit.has_joined:
            return
        if self._given is None:
            check_own_folder(self.path)
        check_plain(self.path / RUN_FILE)

    def as_json(self, fit: Fit) -> dict[str, Any]:
        """Return a description for the process of the loggers."""
        return {
            "product": self.product,
            "home": [type(self).__module__, type(self).__name__],
            "opening": {
                "path": str(self.path),
                "every": self._every,
                "settings": self._settings,
                "config": {**_facts(fit), **self._config},
            },
        }


@final
class Loggers(Callback):
    """Starts one process that reads the event file for all loggers: see ``logger_feed.py``."""

    may_fail = True

    def __init__(self, loggers: Sequence[Logger], events: Path) -> None:
        self._loggers, self._events = loggers, events
        self._process: subprocess.Popen[bytes] | None = None
        self._looked_at_s = 0.0
        self._is_off = True

    def on_begin(self, fit: Fit) -> None:
        """Continue the loggers' runs if the run continues, otherwise begin new ones."""
        self._is_off = False
        if fit.step == 0 and fit.is_leader and not fit.has_joined:
            for logger in self._loggers:
                (logger.path / RUN_FILE).unlink(missing_ok=True)
        self._look(fit)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Print the reports of the process once a second."""
        if time.monotonic() - self._looked_at_s >= _LOOK_EVERY_S:
            self._look(fit)

    def on_workers_changed(self, fit: Fit, before: Sequence[int], why: str) -> None:
        """Start the process if the worker that had one is lost."""
        self._look(fit)

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """End the loggers' runs, and wait until all is sent."""
        self._end(fit, "finished", LOGGER.in_s())

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """End the loggers' runs as failed."""
        is_stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        self._end(fit, "stopped" if is_stopped else "failed", _FAIL_WITHIN_S)

    def _look(self, fit: Fit) -> None:
        """Start the process on the leader, or show what it reports."""
        self._looked_at_s = time.monotonic()
        if self._process is not None:
            self._relay(fit, self._process)
            if not fit.is_leader or self._process.poll() is not None:
                self._end(fit, None, _FAIL_WITHIN_S)
        elif fit.is_leader and not self._is_off:
            self._is_off = True  # one that fails is not started again
            try:
                if trouble := trouble_at(fit, self._events):
                    raise OSError(trouble.removesuffix("."))
                self._process = self._started(fit)
            except OSError as error:
                say_alone(fit, no_numbers("the loggers", shown(error, 1000)))

    def _started(self, fit: Fit) -> subprocess.Popen[bytes]:
        """Start the process; it sends what this event file has, and none of that name."""
        seen = os.stat(self._events)
        file = [seen.st_dev, seen.st_ino]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(Path(__file__).resolve().parents[3])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program
            env={**os.environ, **OUTLIVES},
            bufsize=0,
        )
        os.set_blocking(_pipe(process.stdout).fileno(), False)
        loggers = [logger.as_json(fit) for logger in self._loggers]
        _write(process, {"events": str(self._events), "file": file, "loggers": loggers})
        return process

    def _end(self, fit: Fit, status: str | None, within_s: float) -> None:
        """Make the process send everything and end; with a status it is not started again."""
        self._is_off |= status is not None  # until the next call of `fit`
        if (process := self._process) is None:
            return
        self._process = None
        _write(process, {"end": status or "", "within_s": within_s})
        _pipe(process.stdin).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s + _GRACE_S)
        if process.poll() is None:
            process.kill()
        self._relay(fit, process)
        if process.wait():
            say_alone(fit, no_numbers("the loggers", "their process has ended"))
        _pipe(process.stdout).close()

    def _relay(self, fit: Fit, process: subprocess.Popen[bytes]) -> None:
        """Print the lines that the process has written."""
        while said := _pipe(process.stdout).read(_CHUNK_BYTES):
            for line in said.decode(errors="replace").splitlines():
                say_alone(fit, line)


def with_loggers(callbacks: Sequence[Callback], directory: Path | None) -> list[Callback]:
    """Add a callback that serves the loggers among some callbacks, and may replace the event log.

    Without a run directory, the event file is beside the first logger's path.
    """
    loggers = [one for one in callbacks if isinstance(one, Logger)]
    events = next(one for one in callbacks if isinstance(one, EventLog)).writes_to(directory)
    if loggers and events is None and (path := loggers[0].writes_to(directory)) is not None:
        events = path.with_name(f"{path.name}.events.jsonl")
        log = EventLog(events)
        callbacks = [log if isinstance(one, EventLog) else one for one in callbacks]
    if not loggers or events is None:
        return list(callbacks)
    return [*callbacks, Loggers(loggers, events.absolute())]


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


def _write(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has ended, and `_end` reports that
        _pipe(process.stdin).write(json.dumps(message).encode() + b"\n")


def _facts(fit: Fit) -> dict[str, Any]:
    """Return hyperparameters for loggers: neither the command nor the machine is among them."""
    facts = {name: fit.facts[name] for name in _FACTS if name in fit.facts}
    facts["optimizer"] = type(fit.optimizer).__name__
    return facts | {
        f"optimizer/{name}": value
        for name, value in fit.optimizer.defaults.items()
        if isinstance(value, (bool, int, float, str))
    }


def _as_json(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(TypeError, ValueError):
        return dict(json.loads(json.dumps(dict(given))))
    raise TypeError(
        f"`{name}` must be what JSON can hold, but is {given!r}: pass numbers, texts, "
        f"lists and dicts; of an argparse namespace, `vars(args)`."
    )

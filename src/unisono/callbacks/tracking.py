"""What loggers with a run of their own (W&B, MLflow, Trackio) have in common.

::

    leader ── numbers, JSON lines ──► a process of the logger's own ──► its files or its server
                                      holds <folder>/run.json: the run's id, the last step sent

The leader only writes to a pipe. So a logger that fails, hangs or prints cannot disturb training,
and a worker that is killed loses nothing that it has written: the process reads it to the end. The
next leader starts another process, which waits for that end, continues the same run, and sends
what `run.json` does not count yet. Steps that come again have the same numbers, and are not sent.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from unisono.callbacks.callback import Callback, DoneStep, Fit
from unisono.callbacks.logger_process import LoggerProcess
from unisono.callbacks.place import path_of, say_alone, trouble_at
from unisono.callbacks.scalars import check_installed, of_step, of_validation
from unisono.callbacks.summary import Summary
from unisono.notices import shown
from unisono.plainfile import check_own_folder, check_plain
from unisono.timeouts import LOGGER
from unisono.whole import check_whole

RUN_FILE = "run.json"
_FAIL_WITHIN_S = 5.0  # after an exception or Ctrl-C, whose launcher does not wait for long
# What the worker that writes may have been lost over.
_KNOWN = 8
_FACTS = ("batch_size", "shards", "seed", "world_size", "num_samples", "num_parameters")


class Tracker(Callback):
    """Sends numbers of steps to a logger, each once. Abstract.

    Args:
        settings: for the logger, as JSON.
        config: hyperparameters, beside those that are known.
        path: the folder; None: one of the logger's name in the run directory.
        every: of how many steps one is sent.
    """

    product: ClassVar[str]
    module: ClassVar[str]  # the package, the extra and the folder
    may_fail = True

    def __init__(
        self,
        settings: Mapping[str, Any],
        config: Mapping[str, Any] | None,
        path: str | os.PathLike[str] | None,
        every: int,
    ) -> None:
        check_installed(self.module, self.product, self.module)
        self._settings = _as_json("options", settings)
        self._config = _as_json("config", config or {})
        self._given = None if path is None else Path(path)
        self._every = check_whole("every", every, at_least=1)
        self._path = Path()  # of the call of `fit` under way
        self._process: LoggerProcess | None = None
        LOGGER.in_s()  # a wrong variable is told before training
        self._known: deque[tuple[str, int, dict[str, float]]] = deque(maxlen=_KNOWN)
        self._is_off = True

    def folder_of(self, path: Path) -> Path:
        """Name the folder that the logger is given to write in."""
        return path

    def writes_to(self, directory: Path | None) -> Path | None:
        """See :class:`Callback`."""
        return self._given or (directory and directory / self.module)

    def on_begin(self, fit: Fit) -> None:
        """Continue the logger's run where the run continues, or begin another."""
        self._path = path_of(self, fit, "the logger writes", f'{self.name}(path="runs/mine")')
        if not fit.has_joined:
            if self._given is None:
                check_own_folder(self._path)
            check_plain(self._path / RUN_FILE)
        self._known.clear()
        self._is_off = False
        self._look_who_writes(fit, is_new=fit.step == 0 and not fit.has_joined)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Send the numbers of a step."""
        if step.number % self._every == 0:
            self._add(fit, "step", step.number, of_step(fit, step))
        else:
            self._look_who_writes(fit)

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Send what a validation found."""
        self._add(fit, "validation", fit.step - 1, of_validation(means))

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """End the logger's run, and wait until all is sent."""
        self._close(fit, "finished", LOGGER.in_s())

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """End the logger's run as failed."""
        is_stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        self._close(fit, "stopped" if is_stopped else "failed", _FAIL_WITHIN_S)

    def _add(self, fit: Fit, kind: str, step: int, values: dict[str, float]) -> None:
        self._known.append((kind, step, values))
        if self._look_who_writes(fit) or self._process is None:
            return  # sent with what is known, or by another worker
        try:
            self._process.send([kind, step, values])
        except OSError as error:
            self._complain(fit, error)

    def _look_who_writes(self, fit: Fit, *, is_new: bool = False) -> bool:
        """Begin to write, or leave it to another; return whether all that is known was sent."""
        if not fit.is_leader:
            self._close(fit, "", _FAIL_WITHIN_S)
        elif self._process is None and not self._is_off:
            try:
                if trouble := trouble_at(fit, self._path):
                    raise OSError(trouble)
                self._begin(fit, is_new)
            except OSError as error:
                self._complain(fit, error)
            return True
        return False

    def _begin(self, fit: Fit, is_new: bool) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        head = {
            "module": self.module,
            "folder": str(self.folder_of(self._path)),
            "is_new": is_new,
            "settings": self._settings,
            "config": {**_facts(fit), **self._config},
        }
        self._process = LoggerProcess(self._path / RUN_FILE)
        self._process.send(head)
        for one in self._known:
            self._process.send(one)

    def _complain(self, fit: Fit, error: OSError) -> None:
        self._is_off = True
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        say_alone(
            fit,
            f"{self.product} must take the numbers of each step, but does not "
            f"({shown(error, 1000)}): they are missing there; training goes on.",
        )

    def _close(self, fit: Fit, status: str, within_s: float) -> None:
        if status:
            self._is_off = True  # until the next call of `fit`
        if self._process is None:
            return
        try:
            self._process.end(status, within_s)
            self._process = None
        except OSError as error:
            self._complain(fit, error)


def _facts(fit: Fit) -> dict[str, Any]:
    """List hyperparameters that are known; neither the command nor the machine leaves it."""
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

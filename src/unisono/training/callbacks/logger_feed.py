"""The process of the loggers: it follows the event file, and sends each step once.

``run.json`` in a logger's folder says what was sent, so a process that continues for another reads
the file from its beginning and sends the rest. It locks ``run.json`` until it ends. If the event
file is moved away or becomes another job's, the process sends nothing more. A step that comes again
with other numbers, as from an older checkpoint with other settings, is reported.

One line of JSON on standard input says what to do; another, which is missing if the leader is lost,
says how the call of ``fit`` ended and how long sending may take. Lines for the user are written to
standard output. torch is not loaded.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, final
from zlib import crc32

from unisono.runtime.checkpoint.run_directory import file_id_of
from unisono.runtime.notices import shown
from unisono.runtime.plainfile import open_plain
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.training.events.events import Evaluation, Event, StepEvent
from unisono.training.events.follow import EventReader

RUN_FILE = "run.json"
_LOOK_EVERY_S = 0.5
_LEFT_S = 600  # to send what a lost leader left; the next process waits
_ROWS_AT_ONCE = _ROWS_KNOWN = 1000


class Row(NamedTuple):
    """Numbers of one step, by name."""

    step: int
    time_unix_s: float
    values: dict[str, float]


class Opening(NamedTuple):
    """What a logger is opened with.

    `run_id` finds the logger's run again; None: another run begins.
    """

    path: Path
    every: int
    settings: dict[str, Any]
    config: dict[str, Any]
    run_id: str | None = None


class LoggerRun(Protocol):
    """An open run of a logger."""

    def __init__(self, opening: Opening) -> None: ...

    @property
    def run_id(self) -> str:
        """The id that finds the run again."""

    def log(self, rows: list[Row]) -> None:
        """Log rows with ascending steps; a step may come twice, with other names."""

    def end(self, status: str) -> None:
        """Close the run: "finished", "failed", "stopped", or "" if it will continue."""


def locked_run(folder: Path) -> int:
    """Open ``run.json`` of a logger once no other process sends to the logger's run."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = open_plain(folder / RUN_FILE, os.O_RDWR | os.O_CREAT)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@final
class Sender:
    """Sends rows to a logger's run, each once; ``run.json`` has its id and hashes of the last rows.

    `differs_from`: the first step that came again with other numbers than were sent.
    """

    def __init__(self, opening: Opening, begin: type[LoggerRun], run_fd: int) -> None:
        self._every, self._fd = opening.every, run_fd
        run_id: str | None = None
        self._sent: dict[str, dict[str, int]] = {}  # by kind and step, in their order
        self.differs_from: int | None = None
        with suppress(ValueError, TypeError, KeyError):
            found = json.loads(os.pread(self._fd, 1 << 20, 0))
            run_id, self._sent = str(found["id"]), {k: dict(v) for k, v in found["sent"].items()}
        self._rows: list[Row] = []
        self._run = begin(opening._replace(run_id=run_id))
        self._keep()

    def take(self, event: Event) -> None:
        """Take the next event of the file, which may have been read before."""
        if isinstance(event, StepEvent) and event.step % self._every == 0:
            self._add("step", event.step, event, _of_step(event))
        elif isinstance(event, Evaluation):
            values = {f"validation/{name}": value for name, value in event.means.items()}
            self._add("validation", event.step - 1, event, values)

    def flush(self) -> None:
        """Send the rows taken so far."""
        if self._rows:
            rows, self._rows = self._rows, []
            self._run.log(rows)
            self._keep()

    def end(self, status: str) -> None:
        """End the logger's run."""
        self._run.end(status)

    def _add(self, kind: str, step: int, event: Event, values: dict[str, float]) -> None:
        sent, told = self._sent.setdefault(kind, {}), crc32(repr([*values.items()]).encode())
        if step > int(next(reversed(sent), -1)):
            sent[str(step)] = told
            if len(sent) > _ROWS_KNOWN:
                del sent[next(iter(sent))]
            self._rows.append(Row(step, event.time_unix_s, values))
            if len(self._rows) >= _ROWS_AT_ONCE:
                self.flush()
        elif self.differs_from is None and sent.get(str(step), told) != told:
            self.differs_from = step

    def _keep(self) -> None:
        """Write what was sent to ``run.json``."""
        text = json.dumps({"id": self._run.run_id, "sent": self._sent}).encode()
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))


def _of_step(event: StepEvent) -> dict[str, float]:
    values = {f"train/{name}": mean for name, mean in event.means.items()}
    rates = event.learning_rates
    names = [f"learning_rate/{at}" for at in range(len(rates))]
    values |= zip(names if len(rates) > 1 else ["learning_rate"], rates, strict=False)
    if event.gradient_norm is not None:
        values["gradient_norm"] = event.gradient_norm
    return values


def no_numbers(product: str, why: str) -> str:
    """Return the message that a logger is switched off."""
    return (
        f"{product} must accept the numbers of each step, but does not ({why}): it lacks them; "
        f"training continues."
    )


@final
class _Feed:
    """The threads of the loggers, and what ends them."""

    def __init__(self, work: dict[str, Any], said_fd: int) -> None:
        self._work, self._said_fd = work, said_fd
        self._ends = threading.Event()
        self._status = ""

    def go_through(self, lines: BinaryIO) -> None:
        """Serve the loggers until the leader reports how the call ended, or is lost."""
        loggers = self._work["loggers"]
        serving = [
            threading.Thread(target=self._serve, args=(one,), daemon=True) for one in loggers
        ]
        for thread in serving:
            thread.start()
        said = lines.readline()  # a fork of the leader may keep the pipe open
        end: dict[str, Any] = json.loads(said) if said else {"end": "", "within_s": _LEFT_S}
        self._status = end["end"]
        self._ends.set()
        until_s = time.monotonic() + end["within_s"]
        for thread, logger in zip(serving, loggers, strict=True):
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                self._say(logger["product"], f"it is not done within {end['within_s']:g} s")

    def _serve(self, logger: dict[str, Any]) -> None:
        try:
            self._follow(logger)
        except BaseException as error:
            self._say(logger["product"], f"{type(error).__name__}: {error}")

    def _follow(self, logger: dict[str, Any]) -> None:
        module, name = logger["home"]
        home = getattr(importlib.import_module(module), name)
        opening = {**logger["opening"], "path": Path(logger["opening"]["path"])}
        run_fd = locked_run(opening["path"])
        if self._ends.is_set() and not self._status:
            return  # its leader was lost meanwhile: the process of another one sends all
        sender = Sender(Opening(**opening), home.opens, run_fd)
        events = EventReader(self._work["events"])
        is_over = is_reported = False
        while not is_over:
            is_over = self._ends.wait(_LOOK_EVERY_S)
            # A run replaces its file only when `fit` begins.
            if file_id_of(events.path) != tuple(self._work["file"]):
                raise OSError(f"{events.path} was moved or removed")
            for event in events.new_events():
                sender.take(event)
            sender.flush()
            if not is_reported and (step := sender.differs_from) is not None:
                is_reported = True
                self._print(
                    f"a step that comes again must have the numbers that {logger['product']} got, "
                    f"but step {step} has others (other settings?): {logger['product']} keeps the "
                    f"earlier ones of all steps that were sent; for the new ones, pass another "
                    f"`path`."
                )
        sender.end(self._status)

    def _say(self, product: str, why: str) -> None:
        self._print(no_numbers(product, why))

    def _print(self, line: str) -> None:
        line = shown(line, 4000)  # short enough for a single write
        os.write(self._said_fd, line.encode(errors="replace") + b"\n")


def main() -> None:
    """Serve loggers until standard input ends."""
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    said_fd = os.dup(1)
    os.dup2(2, 1)  # loggers print to standard output
    lines = os.fdopen(0, "rb")
    if not (work := lines.readline()):
        return
    _Feed(json.loads(work), said_fd).go_through(lines)
    os._exit(0)  # a logger's own threads had their time

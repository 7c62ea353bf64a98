"""Writes a table of the run as CSV: a row for each step or epoch."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from unisono.callbacks.logger import Logger
from unisono.callbacks.logger_feed import Opening, named_rates
from unisono.callbacks.place import set_aside
from unisono.plainfile import check_plain, open_plain, written_whole
from unisono.report.events import Evaluation, Event, Start, StepDone

EVERY = ("step", "epoch")

Row = dict[str, int | float]


class CSVLog(Logger):
    """Writes a row for each step or each epoch, each once, also if steps come again. Final.

    Columns: ``step`` and ``epoch``, both counted from 0; the means, for an epoch those of its
    steps weighted by their samples; ``learning_rate`` (``learning_rate_0`` and so on, if there are
    several groups); ``gradient_norm`` of a step; ``validation_loss`` and so on, empty where there
    was no validation. Numbers can be read back exactly. A name that comes later gets a column
    behind the others, for which the file is written anew once; metrics that are lists have none.
    An epoch that two calls of ``fit`` share has a row if the run has a directory.

    Args:
        path: the file; None: ``steps.csv`` or ``epochs.csv`` in the run directory. A file of
            another run that is there gets another name.
        every: ``"step"`` or ``"epoch"``.

    Raises:
        ValueError: `every` is something else.
    """

    product, package = "CSV", "csv"

    def __init__(self, path: str | os.PathLike[str] | None = None, *, every: str = "step") -> None:
        if every not in EVERY:
            raise ValueError(f"`every` must be one of {EVERY}, but is {every!r}.")
        super().__init__({"every": every}, None, path)

    @staticmethod
    def begin(opening: Opening) -> _Table:
        """See :class:`Logger`."""
        return _Table(opening)

    def writes_to(self, directory: Path | None) -> Path | None:
        """See :class:`Callback`."""
        return self._given or (directory and directory / f"{self._settings['every']}s.csv")

    def check_place(self) -> None:
        """See :class:`Logger`."""
        check_plain(self.path)


class _Table:
    """The file, as a reader of the events has it. Final."""

    def __init__(self, opening: Opening) -> None:
        self._path = opening.path
        self._is_of_epochs = opening.settings["every"] == "epoch"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if opening.from_step == 0:
            set_aside(self._path)
        self._columns: list[str] = []
        self._lines: list[bytes] = []  # to be written
        self._last = -1  # the step of its last row
        before = math.inf if opening.from_step is None else opening.from_step
        if self._path.exists():
            self._rewrite([], before)
        self.begin_again()

    def begin_again(self) -> None:
        """See :class:`Reader`."""
        self._row: Row = {}  # the newest, to which a validation may be added
        self._validated: Row = {}  # what was found in the epoch
        self._steps_per_epoch: int | None = None
        self._begin_epoch(-1)

    def take(self, event: Event) -> None:
        """See :class:`Reader`."""
        if isinstance(event, Start):
            self._steps_per_epoch = event.steps_per_epoch
        elif isinstance(event, StepDone):
            self._write_newest()
            if self._is_of_epochs:
                self._count(event)
            else:
                self._row = _row(event, event.means)
                if event.gradient_norm is not None:
                    self._row["gradient_norm"] = event.gradient_norm
        elif isinstance(event, Evaluation):
            self._validated = {f"validation_{name}": v for name, v in event.means.items()}
            if self._row and self._row["step"] == event.step - 1:
                self._row |= self._validated

    def flush(self) -> None:
        """See :class:`Reader`; the newest row waits for its validation."""
        if not self._lines:
            return
        fd = open_plain(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with open(fd, "wb") as file:
            if os.fstat(fd).st_size == 0:
                file.write(_encoded(self._columns))
            file.write(b"".join(self._lines))
        self._lines = []

    def end(self, status: str) -> None:
        """See :class:`Reader`; if another leader continues, the newest row is its own."""
        if status:
            self._write_newest()
            self.flush()

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._steps = self._samples = 0
        self._sums: dict[str, float] = {}
        self._validated = {}

    def _count(self, event: StepDone) -> None:
        """Count a step for its epoch; a whole epoch is a row."""
        if event.epoch != self._epoch:
            self._begin_epoch(event.epoch or 0)
        num_samples = event.num_samples or 0
        self._steps += 1
        self._samples += num_samples
        for name, mean in event.means.items():
            self._sums[name] = self._sums.get(name, 0.0) + mean * num_samples
        if self._steps == self._steps_per_epoch:
            means = {name: total / self._samples for name, total in self._sums.items()}
            self._row = {**_row(event, means), **self._validated}

    def _write_newest(self) -> None:
        row, self._row = self._row, {}
        if not row or row["step"] <= self._last:
            return
        self._last = int(row["step"])
        if new := [name for name in row if name not in self._columns]:
            self.flush()
            if self._path.exists():
                self._rewrite(new)
            else:
                self._columns += new
        self._lines.append(_encoded([row.get(name) for name in self._columns]))

    def _rewrite(self, new: list[str], before: float = math.inf) -> None:
        """Give the file more columns, without the rows of some step and later, or half a row.

        Whoever reads finds the old file or the new one.
        """
        with open(open_plain(self._path, os.O_RDONLY), "rb") as file:
            old = _as_text(file)
            rows = csv.reader(_whole_lines(old))
            self._columns = [*next(rows, []), *new]
            with written_whole(self._path) as whole:
                out = _as_text(whole)
                writer = csv.writer(out, lineterminator="\n")
                if self._columns:
                    writer.writerow(self._columns)
                for row in rows:
                    if row and row[0].isdigit() and (step := int(row[0])) < before:
                        self._last = max(self._last, step)
                        writer.writerow([*row, *[""] * (len(self._columns) - len(row))])
                out.detach()  # it would close the file


def _row(event: StepDone, means: Any) -> Row:
    row: Row = {"step": event.step, "epoch": event.epoch or 0}
    own = {**row, **named_rates(event, "_")}
    return {**row, **{name: mean for name, mean in means.items() if name not in own}, **own}


def _encoded(cells: list[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="backslashreplace")


def _whole_lines(file: TextIO) -> Iterator[str]:
    return (line for line in file if line.endswith("\n"))


def _as_text(file: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")

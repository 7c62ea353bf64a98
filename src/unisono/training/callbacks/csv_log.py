"""Writes a table of the run as CSV: a row for each step."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from unisono.runtime.plainfile import check_plain, open_plain, written_whole
from unisono.training.callbacks.journal import set_aside
from unisono.training.callbacks.logger import Logger
from unisono.training.callbacks.logger_feed import Opening, named_rates
from unisono.training.events.events import Evaluation, Event, StepDone

Row = dict[str, int | float]


class CSVLog(Logger):
    """Writes a row for each step, once, also if steps come again. Final.

    Columns: ``step`` and ``epoch``, both counted from 0; the means; ``learning_rate``
    (``learning_rate_0`` and so on, if there are several groups); ``gradient_norm``;
    ``validation_loss`` and so on, empty where there was no validation. Numbers can be read back
    exactly. A name that comes later gets a column behind the others, for which the file is written
    anew once; metrics that are lists have none.

    Args:
        path: the file; None: ``steps.csv`` in the run directory. A file of another run that is
            there gets another name.
    """

    product, package = "CSV", "csv"

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__({}, None, path)

    @staticmethod
    def begin(opening: Opening) -> _Table:
        """See :class:`Logger`."""
        return _Table(opening)

    def writes_to(self, directory: Path | None) -> Path | None:
        """See :class:`Callback`."""
        return self._given or (directory and directory / "steps.csv")

    def check_place(self) -> None:
        """See :class:`Logger`."""
        check_plain(self.path)


class _Table:
    """The file, as a reader of the events has it. Final."""

    def __init__(self, opening: Opening) -> None:
        self._path = opening.path
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

    def take(self, event: Event) -> None:
        """See :class:`Reader`."""
        if isinstance(event, StepDone):
            self._write_newest()
            self._row = _row(event)
        elif isinstance(event, Evaluation) and self._row.get("step") == event.step - 1:
            self._row |= {f"validation_{name}": value for name, value in event.means.items()}

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


def _row(event: StepDone) -> Row:
    row: Row = {"step": event.step, "epoch": event.epoch or 0}
    own = {**row, **named_rates(event, "_")}
    if event.gradient_norm is not None:
        own["gradient_norm"] = event.gradient_norm
    return {**row, **{name: mean for name, mean in event.means.items() if name not in own}, **own}


def _encoded(cells: list[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="backslashreplace")


def _whole_lines(file: TextIO) -> Iterator[str]:
    return (line for line in file if line.endswith("\n"))


def _as_text(file: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")

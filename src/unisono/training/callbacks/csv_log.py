"""Writes a table of the run as CSV: a row for each step."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

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

    @classmethod
    def begin(cls, opening: Opening) -> _Table:
        """See :class:`Logger`."""
        return _Table(opening)

    def writes_to(self, directory: Path | None) -> Path | None:
        """See :class:`Callback`."""
        return self._given or (directory and directory / "steps.csv")

    def check_place(self) -> None:
        """See :class:`Logger`."""
        check_plain(self.path)


class _Table:
    """The file, as a reader of the events has it: whatever they tell from the beginning. Final."""

    def __init__(self, opening: Opening) -> None:
        self._path = opening.path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if opening.from_step == 0:
            set_aside(self._path)
        self.begin_again()

    def begin_again(self) -> None:
        """See :class:`Reader`."""
        self._columns: list[str] = []
        self._lines: list[bytes] = []  # to be written
        self._is_anew = True  # and take the place of the file
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
        rows, self._lines = b"".join(self._lines), []
        if self._is_anew or not self._path.exists():
            self._replace(rows)
        else:
            with open(open_plain(self._path, os.O_WRONLY | os.O_APPEND), "wb") as file:
                file.write(rows)

    def end(self, status: str) -> None:
        """See :class:`Reader`; if another leader continues, the newest row is its own."""
        if status:
            self._write_newest()
            self.flush()

    def _write_newest(self) -> None:
        row, self._row = self._row, {}
        if new := [name for name in row if name not in self._columns]:
            self._extend(new)
        if row:
            self._lines.append(_encoded([row.get(name) for name in self._columns]))

    def _extend(self, new: list[str]) -> None:
        """Add columns, in which the rows that are there already have nothing."""
        self.flush()
        head, self._columns = _encoded(self._columns), [*self._columns, *new]
        if not self._is_anew and self._path.exists():
            with open(open_plain(self._path, os.O_RDONLY), "rb") as file:
                rows = file.read().removeprefix(head)
            self._replace(rows.replace(b"\n", b"," * len(new) + b"\n"))

    def _replace(self, rows: bytes) -> None:
        """Write the file anew; whoever reads finds the old one or the new one."""
        with written_whole(self._path) as file:
            file.write(_encoded(self._columns) + rows)
        self._is_anew = False


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

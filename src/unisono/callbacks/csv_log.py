"""Writes a table of the run as CSV: a row for each step or epoch."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from unisono.callbacks.callback import Callback, DoneStep, Fit
from unisono.callbacks.journal import Journal
from unisono.callbacks.place import path_of, say_alone
from unisono.callbacks.scalars import named_rates
from unisono.callbacks.summary import Summary
from unisono.plainfile import check_plain, open_plain

EVERY = ("step", "epoch")

Row = dict[str, int | float | None]


class CSVLog(Callback):
    """Writes a row for each step or each epoch, each once, also if steps come again. Final.

    Columns: ``step`` and ``epoch``, both counted from 0; the means, for an epoch those of its
    steps weighted by their samples; ``learning_rate`` (``learning_rate_0`` and so on, if there are
    several groups); ``gradient_norm`` of a step; ``validation_loss`` and so on, empty where there
    was no validation. Numbers can be read back exactly. A name that comes later gets a column
    behind the others, for which the file is written anew once; metrics that are lists have none.

    Args:
        path: the file; None: ``steps.csv`` or ``epochs.csv`` in the run directory. A file of
            another run that is there gets another name.
        every: ``"step"`` or ``"epoch"``.

    Raises:
        ValueError: `every` is something else.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, every: str = "step") -> None:
        if every not in EVERY:
            raise ValueError(f"`every` must be one of {EVERY}, but is {every!r}.")
        self._given = None if path is None else Path(path)
        self._every = every
        self._path = Path()  # of the call of `fit` under way
        self._journal: Journal | None = None
        self._columns: list[str] | None = None
        self._row: Row = {}
        self._sums: dict[str, float] = {}
        self._samples = 0
        self._validated: dict[str, float] = {}

    def writes_to(self, directory: Path | None) -> Path | None:
        """See :class:`Callback`."""
        return self._given or (directory and directory / f"{self._every}s.csv")

    def forget(self) -> None:
        """Forget the epoch that an earlier run was in."""
        self._sums, self._samples, self._validated = {}, 0, {}

    def on_begin(self, fit: Fit) -> None:
        """Continue the file where the run continues, or begin it."""
        path = self._path = path_of(self, fit, "the table goes", 'CSVLog("log.csv")')
        if not fit.has_joined:
            check_plain(path)
        self._journal = Journal(path, step_of, fit)
        self._columns, self._row = None, {}
        if fit.is_leader and fit.step == 0 and not fit.has_joined:
            self._journal.set_aside()
        self._journal.cut(fit.step)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Write the row of a step, or count it for that of its epoch."""
        if self._every == "step":
            row = _row(fit, step.number, step.epoch, step.means)
            if step.gradient_norm is not None:
                row["gradient_norm"] = step.gradient_norm
            self._write(fit, row)
            return
        self._samples += step.num_samples
        for name, mean in step.means.items():
            self._sums[name] = self._sums.get(name, 0.0) + mean * step.num_samples

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Write the newest row again, with what a validation found."""
        found = {
            f"validation_{name}": value
            for name, value in means.items()
            if isinstance(value, (int, float))
        }
        if self._every == "epoch":
            # What is found at the very end belongs to an epoch that may go on, and is kept.
            self._validated = self._validated if fit.has_ended else found
        elif self._row and self._journal is not None:
            self._journal.cut(fit.step - 1)
            self._write(fit, {**self._row, **found})

    def on_epoch_end(self, fit: Fit) -> None:
        """Write the row of an epoch."""
        if self._every == "epoch":
            means = {name: total / self._samples for name, total in self._sums.items()}
            row = _row(fit, fit.step - 1, fit.epoch - 1, means)
            self._write(fit, {**row, **self._validated})
            self.forget()

    def on_workers_changed(self, fit: Fit, before: Sequence[int], why: str) -> None:
        """Remove rows of undone steps that a lost worker has left."""
        if self._journal is not None:
            self._journal.cut(fit.step)

    def on_went_back(self, fit: Fit, from_step: int) -> None:
        """Remove the rows of the steps that come again."""
        if self._journal is not None:
            self._journal.cut(fit.step)

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Close the file."""
        self._close()

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """Close the file."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the epoch under way."""
        return {"sums": self._sums, "samples": self._samples, "validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the sums of the epoch under way."""
        self._sums, self._samples = dict(state["sums"]), int(state["samples"])
        self._validated = dict(state["validated"])

    def _write(self, fit: Fit, row: Row) -> None:
        self._row = row
        if self._journal is None:
            return
        if fit.is_leader:
            self._widen(fit, list(row))
        at = row["step"]
        assert at is not None, "every row is of a step"
        self._journal.add(at, lambda: self._line(row))

    def _widen(self, fit: Fit, names: list[str]) -> None:
        """Add columns for new names, unless the file is still empty."""
        assert self._journal is not None, "only where there is a file"
        columns = self._known_columns()
        new = [name for name in names if name not in (columns or names)]
        if columns is None or not new:
            return
        self._journal.take_over()
        self._journal.close()
        self._columns = [*columns, *new]
        try:
            _rewrite(self._path, self._columns)
        except (OSError, csv.Error) as error:
            why = f"as it cannot be written anew: {error}"
            say_alone(fit, f"{self._path} has no columns for {new}, {why}.")

    def _line(self, row: Row) -> bytes:
        """Write a row, the first one below the names of the columns."""
        columns, before = self._known_columns(), b""
        if columns is None:
            columns = self._columns = list(row)
            before = encode(columns)
        return before + encode([row.get(name) for name in columns])

    def _known_columns(self) -> list[str] | None:
        """Name the columns of the file; None while it has none, also if a full disk took none."""
        if self._columns is None or not _has_content(self._path):
            self._columns = _read_columns(self._path)
        return self._columns

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal, self._columns = None, None


def encode(cells: list[Any]) -> bytes:
    """Write one line of the file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="backslashreplace")


def step_of(line: bytes) -> float | None:
    """Tell which step a line belongs to, for :class:`Journal`; None of the names of columns."""
    first = line.partition(b",")[0]
    return float(first) if first.isdigit() else None


def _has_content(path: Path) -> bool:
    try:
        return os.lstat(path).st_size > 0
    except OSError:
        return False


def _read_columns(path: Path) -> list[str] | None:
    """Read the names of the columns; None where there are none yet."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            names = next(csv.reader(file), None)
    except (OSError, csv.Error):
        return None
    return names if names and names[0] == "step" else None


def _opened(path: Path, flags: int) -> TextIO:
    mode = "r" if flags == os.O_RDONLY else "w"
    fd = open_plain(path, flags)
    return cast(TextIO, open(fd, mode, newline="", encoding="utf-8", errors="surrogateescape"))


def _rewrite(path: Path, columns: list[str]) -> None:
    """Give a file more columns, with empty cells; a reader finds the old file or the new one."""
    beside = path.with_name(f".{path.name}.part")
    beside.unlink(missing_ok=True)  # of somebody who was killed
    try:
        with (
            _opened(path, os.O_RDONLY) as old,
            _opened(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new,
        ):
            rows = csv.reader(old)
            next(rows, None)
            writer = csv.writer(new, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _row(fit: Fit, step: int, epoch: int, means: Mapping[str, float]) -> Row:
    row: Row = {"step": step, "epoch": epoch}
    own = {**row, **named_rates(fit.optimizer, "_")}
    return {**row, **{name: mean for name, mean in means.items() if name not in own}, **own}

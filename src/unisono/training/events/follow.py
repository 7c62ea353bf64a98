"""What is new in a run's event file since the last read?

The file may grow while it is read, be torn at its end, be hundreds of megabytes long, or be
replaced by another one when a run resumes. A line counts once it ends in a newline. ::

    {…}\n {…}\n │ {…}\n {"eve
                 └ offset_bytes: the next read begins here

If the file was replaced, or is shorter, it is read from its beginning again.

Steps are read many at once: the values of one field in all lines are checked together for type and
size. Values of the type that JSON gives, within bounds, are used unchanged; others go through their
reader, one by one. Invariant: the result equals that of :func:`read_event` for each line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, takewhile
from operator import methodcaller
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

from unisono.errors import DataFormatError
from unisono.runtime.plainfile import open_plain, path_given
from unisono.training.events import events
from unisono.training.events.events import (
    MAX_NUMBER,
    MAX_RANKS,
    MAX_SECONDS,
    Event,
    NewerFormatError,
    StepEvent,
    read_event,
)

FILE_NAME = "events.jsonl"

_AT_ONCE_BYTES = 1 << 16  # about a hundred steps of two workers
_STEP = b'{"event":"step"'  # how the line of a step begins


def run_folder(directory: str | os.PathLike[str], *, may_come: bool = False) -> Path:
    """Return the folder of a run; raise ValueError if there is none, unless it `may_come`."""
    folder = path_given(directory)
    if "://" in os.fspath(directory):
        raise ValueError(
            "DIRECTORY must be a run's folder, but is a URL: name the folder that is copied there, "
            "`trainer.directory`, or copy the run to a folder first."
        )
    if not folder.is_dir() and not (may_come and not os.path.lexists(folder)):
        raise ValueError(
            f"DIRECTORY must be a run's folder, but {os.fspath(directory)!r} is none: name what "
            "the script passes as `directory` to its Trainer, which makes it when it begins."
        )
    return folder


def events_file(directory: str | os.PathLike[str]) -> Path:
    """Return the path of a run's event file; raise ValueError if there is none."""
    path = run_folder(directory) / FILE_NAME
    if not path.exists():
        raise ValueError(
            f"DIRECTORY must hold {FILE_NAME}, but {os.fspath(directory)!r} does not: name the "
            "folder of a run that has begun, which its script passes as `directory` to its Trainer."
        )
    return path


class EventReader:
    """Reads an event file piece by piece, as often as needed.

    Steps more than `recent_bytes` before the end are skipped unread, forty times faster; None: all
    steps are read.
    """

    def __init__(self, path: str | os.PathLike[str], recent_bytes: int | None = None) -> None:
        self.path = Path(path)
        self._recent_bytes = math.inf if recent_bytes is None else recent_bytes
        self._file: tuple[int, int] | None = None
        self._begin()

    def new_events(self, begin: Callable[[], None] = lambda: None) -> Iterator[Event]:
        """Yield the events added since the last call, or all of them if the file was replaced.

        In that case `begin` is called first: earlier events are void. Raises ValueError if the file
        cannot be read, DataFormatError if a newer version wrote it.
        """
        with self._open() as file:
            if not self._is_continued(file):
                self._begin()
                begin()
            self._file = _identity(file)
            self._steps_from = os.fstat(file.fileno()).st_size - self._recent_bytes
            file.seek(self.offset_bytes)
            yield from self._events(file)

    def _begin(self) -> None:
        self.offset_bytes = 0  # read so far
        self.num_unreadable = 0  # lines since the file's beginning

    def _open(self) -> BinaryIO:
        try:
            return os.fdopen(open_plain(self.path, os.O_RDONLY), "rb")
        except OSError as error:
            raise ValueError(
                f"{str(self.path)!r} must be a plain file that you may read, but is not "
                f"({error.strerror or 'a link, a pipe or a folder'}): check the folder and its "
                "permissions."
            ) from None

    def _is_continued(self, file: BinaryIO) -> bool:
        """Return whether this is the file read before, which only grows."""
        is_same = self._file == _identity(file)
        return is_same and os.fstat(file.fileno()).st_size >= self.offset_bytes

    def _events(self, file: BinaryIO) -> Iterator[Event]:
        """Read whole lines, and record the offset up to which events were yielded."""
        while lines := file.readlines(_AT_ONCE_BYTES):
            whole = list(takewhile(methodcaller("endswith", b"\n"), lines))
            for are_steps, group in groupby(whole, methodcaller("startswith", _STEP)):
                some = list(group)
                is_new = self.offset_bytes + sum(map(len, some)) >= self._steps_from
                steps = read_steps(some) if are_steps and is_new else None
                for number, line in enumerate(some):
                    self.offset_bytes += len(line)
                    if are_steps and self.offset_bytes < self._steps_from:
                        continue
                    event = self._read(line) if steps is None else steps[number]
                    if event is not None:
                        yield event
            if len(whole) < len(lines):
                return  # a line was torn; by now its other half may follow, which is no line

    def _read(self, line: bytes) -> Event | None:
        if not line.strip():
            return None
        try:
            return read_event(line)
        except NewerFormatError as error:
            raise DataFormatError(
                f"{str(self.path)!r} must be in a format that this version of Unisono reads, but "
                f"was {error}: use the version that wrote it, or a newer one."
            ) from None
        except ValueError:
            self.num_unreadable += 1
            return None


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _are_counts(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_NUMBER


def _are_floats(values: Iterable[Any]) -> bool:
    return set(map(type, values)) == {float}


def _are_times(values: Sequence[Any]) -> bool:
    # A sum with NaN is not below anything.
    return _are_floats(values) and min(values) >= 0 and sum(values) <= MAX_SECONDS


# Values that no reader changes, if all pass the check.
_PLAIN = {
    events.Step: _are_counts,
    events.Count: _are_counts,
    events.Number: _are_floats,
    events.Seconds: _are_times,
    events.Time: _are_times,
}
_PLAIN_ENTRIES = {
    events.Counts: _are_counts,
    events.OptionalCounts: _are_counts,
    events.Numbers: _are_floats,
    events.Column: _are_times,
}
_FIELDS = events.kinds_of(StepEvent)
_NAMES = [*_FIELDS]
_BY_RANK = _NAMES.index("ranks")  # from here on, a field has one entry per rank, or none
_decode = json.JSONDecoder().raw_decode


def read_steps(lines: Sequence[bytes]) -> list[StepEvent] | None:
    """Read lines that begin like a step; return None if each must be read separately."""
    try:
        texts = [line.decode() for line in lines]
        found = [_decode(text) for text in texts]
        rows = [row for row, _ in found]
        columns = [_read_all([row.get(name) for row in rows], _FIELDS[name]) for name in _NAMES]
    except (ValueError, RecursionError):
        return None
    are_whole = [end + 1 for _, end in found] == [*map(len, texts)]
    if not are_whole or any(row.get("event") != "step" for row in rows):
        return None
    num_ranks, *lengths = ([*map(len, column)] for column in columns[_BY_RANK:])
    for one in lengths:
        if one != num_ranks and any(n and n != num for n, num in zip(one, num_ranks, strict=True)):
            return None
    return [_step(values) for values in zip(*columns, strict=True)]


def _read_all(values: list[Any], kind: Any) -> list[Any]:
    (read,) = kind.__metadata__
    types = set(map(type, values))
    if types == {NoneType}:
        return [read(None)] * len(values)
    if kind in _PLAIN and _PLAIN[kind](values):
        return values
    if kind is events.Means and types == {dict}:
        means = chain.from_iterable(map(dict.values, values))
        return values if _are_floats(means) else list(map(read, values))
    if kind in _PLAIN_ENTRIES and types == {list} and max(map(len, values)) <= MAX_RANKS:
        entries = list(chain.from_iterable(values))
        if _PLAIN_ENTRIES[kind](entries):
            return list(map(tuple, values))
    return list(map(read, values))


def _step(values: Iterable[Any]) -> StepEvent:
    step = object.__new__(StepEvent)
    step.__dict__.update(zip(_NAMES, values))  # noqa: B905  # half of what `__init__` takes
    return step

"""Which steps of an event file are judged? Some windows, each of consecutive steps.

A file may have gigabytes, so windows are read at equal distances, or, during a run, from its
end::

    the file   │ a fit before │ warm-up │ ▒▒      ▒▒      ▒▒      ▒▒      ▒▒ │
                              └ since this step            a window: 32 steps or some more

A line is not trusted: one that is torn, or not a step's, only ends a window.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from unisono.runtime.plainfile import open_plain
from unisono.training.events.events import PHASES, StepEvent, read_event

Seconds: TypeAlias = "npt.NDArray[np.float64]"

COLUMNS = ("between", *PHASES)
WARMUP_STEPS, WINDOW_STEPS = 10, 32
_STEPS_AT_LEAST = 24  # in a window
_WINDOWS_AT_MOST, _NEWEST = 12, 2
_PIECE_BYTES = 1 << 17  # holds a line of a step of a thousand workers
_LONGER = 1.2  # times an early step's line; numbers grow
_STEP = b'{"event":"step"'
_PAUSE, _PAUSE_S = 10.0, 1e-3  # times the usual, plus seconds: no step begins so late


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Some steps of the same workers, in seconds."""

    ranks: tuple[int, ...]  # the workers
    times: Seconds  # of shape (steps, workers, columns), see `COLUMNS`


@dataclass(frozen=True, slots=True)
class StepSample:
    """Some steps of one call of ``fit``."""

    windows: tuple[StepWindow, ...]  # in their order
    delayed: Mapping[int, float]  # by rank, the fraction of time that it waited for a core


def sample_of(
    path: Path, *, since_step: int, batch_size: int, is_newest: bool = False
) -> StepSample:
    """Read windows of full batches from a call of ``fit`` that began at `since_step`."""
    fd = open_plain(path, os.O_RDONLY)
    try:
        rows = [list(_rows_of(lines)) for lines in _pieces(fd, since_step, is_newest=is_newest)]
    finally:
        os.close(fd)
    kept = [[row for row in some if row.step >= since_step + WARMUP_STEPS] for some in rows]
    windows = (_window_of(some, batch_size) for some in kept)
    rows_of_delays = [row for some in kept for row in some if row.delayed_s]
    return StepSample(tuple(filter(None, windows)), _delayed_parts(rows_of_delays))


def _pieces(fd: int, since_step: int, *, is_newest: bool) -> Iterator[bytes]:
    """Yield the pieces of the file that contain windows; nothing if it has too few steps."""
    size = os.fstat(fd).st_size
    begin, end = 0, size  # `begin`: before the first step's line; steps ascend
    while end - begin > _PIECE_BYTES:
        middle = (begin + end) // 2
        row = next(_rows_of(os.pread(fd, _PIECE_BYTES, middle)), None)
        if row is None or row.step >= since_step:
            end = middle
        else:
            begin = middle
    lines = os.pread(fd, _PIECE_BYTES, begin).split(b"\n")[:-1]
    first = next((line for line in lines if line.startswith(_STEP)), b"")
    line_bytes = _LONGER * len(first)
    begin += int(line_bytes * WARMUP_STEPS)
    window_bytes = int(line_bytes * (WINDOW_STEPS + 2))
    num_windows = min((size - begin) // max(window_bytes, 1), _WINDOWS_AT_MOST)
    if not first or num_windows < 2:
        return
    if is_newest:
        begin, num_windows = size - _NEWEST * window_bytes, _NEWEST
    for number in range(num_windows):
        at = begin + (size - window_bytes - begin) * number // (num_windows - 1)
        yield os.pread(fd, window_bytes, at)


def _rows_of(piece: bytes) -> Iterator[StepEvent]:
    """Read lines of steps for which all workers have reported their times."""
    for line in piece.split(b"\n")[:-1]:
        row = None
        with suppress(ValueError):
            row = read_event(line) if line.startswith(_STEP) else None
        if isinstance(row, StepEvent) and row.ranks and not np.isnan(_times_of(row)).any():
            yield row


def _times_of(row: StepEvent) -> Seconds:
    """Return when each worker began and how long its phases took, of shape (workers, columns)."""
    nothing = (None,) * len(row.ranks)
    columns = [column or nothing for column in (row.begun_s, *row.phases)]
    return np.array(columns, dtype=float).T


def _window_of(rows: list[StepEvent], batch_size: int) -> StepWindow | None:
    """Return a window of the last consecutive steps; None if they are too few."""
    pairs: list[tuple[StepEvent, StepEvent]] = []
    for before, row in pairwise(rows):
        if row.step != before.step + 1 or row.ranks != before.ranks:
            pairs = []
        elif row.num_samples == batch_size:
            pairs.append((before, row))
    if len(pairs) < _STEPS_AT_LEAST:
        return None
    times = np.stack([_times_of(row) for _, row in pairs])
    ended_s = np.stack([_times_of(before).sum(axis=1) for before, _ in pairs])
    times[..., 0] -= ended_s
    return StepWindow(pairs[0][1].ranks, np.maximum(without_pauses(times), 0.0))


def without_pauses(times: Seconds) -> Seconds:
    """Remove steps that began late, as after an evaluation."""
    latest_s = times[..., 0].max(axis=1)
    kept: Seconds = times[latest_s <= _PAUSE * np.median(latest_s) + _PAUSE_S]
    return kept


def _delayed_parts(rows: list[StepEvent]) -> dict[int, float]:
    seen: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        for rank, delayed_s in zip(row.ranks, row.delayed_s, strict=True):
            if delayed_s is not None:
                seen.setdefault(rank, []).append((row.time_unix_s, delayed_s))
    parts = {}
    for rank, looks in seen.items():
        (first_unix_s, first_s), (last_unix_s, last_s) = looks[0], looks[-1]
        if last_unix_s > first_unix_s:
            parts[rank] = min(max((last_s - first_s) / (last_unix_s - first_unix_s), 0.0), 1.0)
    return parts

"""What does one line of a run's event file say?

A line is untrusted: nothing is believed about its size or the types of its values. What is missing
has a default that says so; what is there with another type makes the whole line unreadable. Events
and keys that are not known are passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from unisono.report.events import (
    Checkpoint,
    Column,
    End,
    Evaluation,
    Event,
    Failure,
    Start,
    StepDone,
    WentBack,
    Workers,
)

FORMAT = 1
MAX_NUMBER = 2**53  # beyond it a JSON reader may not tell neighbours apart
MAX_RANKS = 4096
MAX_SECONDS = 1e12  # no clock shows more

_NAN = math.nan
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class NewerFormatError(ValueError):
    """The file was written in a format that this version does not know."""


def read_event(line: bytes) -> Event | None:
    """Read one line.

    Args:
        line: one JSON object in UTF-8.

    Returns:
        What it says, or None for an event that is not known.

    Raises:
        NewerFormatError: the file is of a format that this version cannot read.
        ValueError: the line is not what the format says.
    """
    found = _loads(line)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    read = _READERS.get(_text(found, "event") or "")
    return None if read is None else read(found)


def _loads(line: bytes) -> Any:
    try:
        found = json.loads(line)
        if b"\\ud" in line.lower():
            # Half of a surrogate pair is allowed in JSON, but cannot be written as UTF-8.
            text = json.dumps(found, ensure_ascii=False)
            found = json.loads(text.encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("nested too deep") from None
    return found


def _read_start(line: dict[str, Any]) -> Start:
    if (written := _count(line, "format")) is not None and written > FORMAT:
        raise NewerFormatError(f"written in format {written}")
    return Start(
        time_unix_s=_time(line),
        step=_step(line),
        clock_s=_finite(line, "clock_s"),
        epoch=_count(line, "epoch"),
        end_step=_count(line, "end_step"),
        steps_per_epoch=_count(line, "steps_per_epoch"),
        num_samples=_count(line, "num_samples"),
        batch_size=_count(line, "batch_size"),
        shards=_count(line, "shards"),
        seed=_whole(line.get("seed")),
        world_size=_count(line, "world_size"),
        ranks=_counts(line, "ranks"),
        pids=_pids(line),
        host=_text(line, "host"),
        identity=_object(line, "identity"),
        versions=_object(line, "versions"),
        machine=_object(line, "machine"),
        command=_texts(line, "command"),
        folder=_text(line, "folder"),
        num_parameters=_count(line, "num_parameters"),
        loader_workers=_count(line, "loader_workers"),
    )


def _read_step(line: dict[str, Any]) -> StepDone:
    ranks = _counts(line, "ranks")
    return StepDone(
        time_unix_s=_time(line),
        step=_step(line),
        epoch=_count(line, "epoch"),
        num_samples=_count(line, "num_samples"),
        seconds=_finite(line, "seconds"),
        means=_means(line),
        learning_rates=tuple(_number(value) for value in _list(line, "learning_rates")),
        gradient_norm=_optional_number(line, "gradient_norm"),
        ranks=ranks,
        begun_s=_column(line, "begun_s", len(ranks)),
        loading_s=_column(line, "loading_s", len(ranks)),
        forward_s=_column(line, "forward_s", len(ranks)),
        backward_s=_column(line, "backward_s", len(ranks)),
        waiting_s=_column(line, "waiting_s", len(ranks)),
        summing_s=_column(line, "summing_s", len(ranks)),
        updating_s=_column(line, "updating_s", len(ranks)),
    )


def _read_workers(line: dict[str, Any]) -> Workers:
    return Workers(
        time_unix_s=_time(line),
        step=_step(line),
        ranks=_counts(line, "ranks"),
        pids=_pids(line),
        lost=_counts(line, "lost"),
        joined=_counts(line, "joined"),
        why=_texts(line, "why"),
    )


def _read_went_back(line: dict[str, Any]) -> WentBack:
    return WentBack(time_unix_s=_time(line), step=_step(line), from_step=_count(line, "from_step"))


def _read_evaluation(line: dict[str, Any]) -> Evaluation:
    return Evaluation(
        time_unix_s=_time(line),
        step=_step(line),
        epoch=_count(line, "epoch"),
        seconds=_finite(line, "seconds"),
        means=_means(line),
    )


def _read_checkpoint(line: dict[str, Any]) -> Checkpoint:
    return Checkpoint(time_unix_s=_time(line), step=_step(line))


def _read_failure(line: dict[str, Any]) -> Failure:
    return Failure(
        time_unix_s=_time(line),
        step=_step(line),
        rank=_count(line, "rank"),
        error=_text(line, "error") or "an exception",
        message=_text(line, "message") or "",
    )


def _read_end(line: dict[str, Any]) -> End:
    stopped = line.get("stopped_early", False)
    if not isinstance(stopped, bool):
        raise ValueError("`stopped_early` is not true or false")
    return End(
        time_unix_s=_time(line),
        step=_step(line),
        seconds=_finite(line, "seconds"),
        samples_per_second=_finite(line, "samples_per_second"),
        digest=_text(line, "digest"),
        stopped_early=stopped,
    )


_READERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "start": _read_start,
    "step": _read_step,
    "workers": _read_workers,
    "went_back": _read_went_back,
    "evaluation": _read_evaluation,
    "checkpoint": _read_checkpoint,
    "failure": _read_failure,
    "end": _read_end,
}


def _time(line: dict[str, Any]) -> float:
    seconds = _finite(line, "time_unix_s")
    return _NAN if seconds is None else seconds


def _step(line: dict[str, Any]) -> int:
    step = _count(line, "step")
    if step is None:
        raise ValueError("no `step`")
    return step


def _whole(value: Any) -> int | None:
    if value is None:
        return None
    # True is an int in Python, and no number of anything.
    if type(value) is not int or abs(value) > MAX_NUMBER:
        raise ValueError("not a whole number of a sane size")
    return value


def _count(line: dict[str, Any], key: str) -> int | None:
    value = _whole(line.get(key))
    if value is not None and value < 0:
        raise ValueError(f"`{key}` is below 0")
    return value


def _counts(line: dict[str, Any], key: str) -> tuple[int, ...]:
    values = _list(line, key)
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_NUMBER:
            raise ValueError(f"`{key}` does not hold numbers alone")
    return tuple(values)


def _pids(line: dict[str, Any]) -> tuple[int | None, ...]:
    pids = _list(line, "pids")
    _counts({"pids": [pid for pid in pids if pid is not None]}, "pids")
    return tuple(pids)


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError("a number beyond all bounds") from None
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise ValueError("not a number")


def _optional_number(line: dict[str, Any], key: str) -> float | None:
    value = line.get(key)
    return None if value is None else _number(value)


def _finite(line: dict[str, Any], key: str) -> float | None:
    """Read a number; one that is not finite, or beyond all clocks, says as little as none."""
    value = _optional_number(line, key)
    return value if value is not None and abs(value) <= MAX_SECONDS else None


def _column(line: dict[str, Any], key: str, num_ranks: int) -> Column:
    values = _list(line, key)
    if not values:
        return ()
    if len(values) != num_ranks:
        raise ValueError(f"`{key}` has not one entry for each of {num_ranks} ranks")
    return tuple(
        # Nearly all are such, and a long run has millions.
        value if type(value) is float and 0 <= value <= MAX_SECONDS else _entry(value)
        for value in values
    )


def _entry(value: Any) -> float | None:
    if value is None:
        return None
    number = _number(value)
    return number if 0 <= number <= MAX_SECONDS else None


def _means(line: dict[str, Any]) -> Mapping[str, float]:
    return {name: _number(value) for name, value in _object(line, "means").items()}


def _object(line: dict[str, Any], key: str) -> Mapping[str, Any]:
    value = line.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"`{key}` is not an object")
    return value


def _list(line: dict[str, Any], key: str) -> list[Any]:
    value = line.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_RANKS:
        raise ValueError(f"`{key}` is not a list of a sane length")
    return value


def _text(line: dict[str, Any], key: str) -> str | None:
    value = line.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`{key}` is not text")
    return value


def _texts(line: dict[str, Any], key: str) -> tuple[str, ...]:
    values = _list(line, key)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"`{key}` does not hold text alone")
    return tuple(values)

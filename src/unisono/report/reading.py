"""What does one line of a run's event file say?

A line is untrusted: nothing is believed about its size or the types of its values. What is missing
has a default that says so; what is there with another type makes the whole line unreadable. Events
and keys that are not known are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from unisono.report.events import (
    Checkpoint,
    End,
    Evaluation,
    Event,
    Failure,
    Interrupted,
    Start,
    StepDone,
    WentBack,
    Workers,
)
from unisono.report.fields import Fields

FORMAT = 1


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
    fields = Fields(found)
    read = _READERS.get(fields.text("event") or "")
    return None if read is None else read(fields)


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


def _read_start(line: Fields) -> Start:
    if (written := line.count("format")) is not None and written > FORMAT:
        raise NewerFormatError(f"written in format {written}")
    return Start(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        clock_s=line.seconds("clock_s"),
        epoch=line.count("epoch"),
        end_step=line.count("end_step"),
        steps_per_epoch=line.count("steps_per_epoch"),
        num_samples=line.count("num_samples"),
        batch_size=line.count("batch_size"),
        shards=line.count("shards"),
        seed=line.whole("seed"),
        world_size=line.count("world_size"),
        ranks=line.counts("ranks"),
        pids=line.optional_counts("pids"),
        host=line.text("host"),
        identity=line.mapping("identity"),
        versions=line.mapping("versions"),
        machine=line.mapping("machine"),
        command=line.texts("command"),
        folder=line.text("folder"),
        num_parameters=line.count("num_parameters"),
        loader_workers=line.count("loader_workers"),
    )


def _read_step(line: Fields) -> StepDone:
    ranks = line.counts("ranks")
    return StepDone(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        epoch=line.count("epoch"),
        num_samples=line.count("num_samples"),
        seconds=line.seconds("seconds"),
        means=line.numbers_by_name("means"),
        learning_rates=line.numbers("learning_rates"),
        gradient_norm=line.number("gradient_norm"),
        ranks=ranks,
        begun_s=line.column("begun_s", len(ranks)),
        loading_s=line.column("loading_s", len(ranks)),
        forward_s=line.column("forward_s", len(ranks)),
        backward_s=line.column("backward_s", len(ranks)),
        waiting_s=line.column("waiting_s", len(ranks)),
        summing_s=line.column("summing_s", len(ranks)),
        updating_s=line.column("updating_s", len(ranks)),
    )


def _read_workers(line: Fields) -> Workers:
    return Workers(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        ranks=line.counts("ranks"),
        pids=line.optional_counts("pids"),
        lost=line.counts("lost"),
        joined=line.counts("joined"),
        why=line.texts("why"),
    )


def _read_went_back(line: Fields) -> WentBack:
    return WentBack(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        from_step=line.count("from_step"),
    )


def _read_evaluation(line: Fields) -> Evaluation:
    return Evaluation(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        epoch=line.count("epoch"),
        seconds=line.seconds("seconds"),
        means=line.numbers_by_name("means"),
    )


def _read_checkpoint(line: Fields) -> Checkpoint:
    return Checkpoint(time_unix_s=line.time_unix_s(), step=line.step())


def _read_failure(line: Fields) -> Failure:
    return Failure(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        rank=line.count("rank"),
        error=line.text("error") or "an exception",
        message=line.text("message") or "",
    )


def _read_interrupted(line: Fields) -> Interrupted:
    by = line.text("by") or "a signal"
    return Interrupted(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        rank=None,
        error="interrupted",
        message=f"by {'Ctrl-C' if by == 'SIGINT' else by}",
    )


def _read_end(line: Fields) -> End:
    return End(
        time_unix_s=line.time_unix_s(),
        step=line.step(),
        seconds=line.seconds("seconds"),
        samples_per_second=line.seconds("samples_per_second"),
        digest=line.text("digest"),
        stopped_early=line.is_true("stopped_early"),
    )


_READERS: dict[str, Callable[[Fields], Event]] = {
    "start": _read_start,
    "step": _read_step,
    "workers": _read_workers,
    "went_back": _read_went_back,
    "evaluation": _read_evaluation,
    "checkpoint": _read_checkpoint,
    "failure": _read_failure,
    "interrupted": _read_interrupted,
    "end": _read_end,
}

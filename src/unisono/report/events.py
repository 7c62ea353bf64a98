"""What can happen in a run, as a line of its event file says it?

A line is untrusted: nothing is believed about its size or the types of its values. A field that is
missing is None, empty or NaN; one of another type than is written here makes the whole line
unreadable. Events and fields that are not known are passed over. `docs/events.md` explains them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from unisono.quantities import plural
from unisono.report import fields

FORMAT = 1
PHASES = ("loading", "forward", "backward", "waiting", "summing", "updating")
_phases = attrgetter(*(f"{name}_s" for name in PHASES))


class NewerFormatError(ValueError):
    """The file was written in a format that this version does not know."""


@dataclass(frozen=True)
class Event:
    """Something that happened: a line of the file. ``step`` is how many steps were done then."""

    time_unix_s: fields.Time
    step: fields.Step


@dataclass(frozen=True)
class Start(Event):
    """A fit, or one that starts again, begins."""

    epoch: fields.Count
    end_step: fields.Count
    steps_per_epoch: fields.Count
    batch_size: fields.Count
    shards: fields.Count
    world_size: fields.Count
    ranks: fields.Counts
    pids: fields.OptionalCounts
    host: fields.Text
    identity: fields.Object
    versions: fields.Object
    machine: fields.Object
    command: fields.Texts
    folder: fields.Text
    num_parameters: fields.Count
    loader_workers: fields.Count
    divided_by_speed: fields.Flag


@dataclass(frozen=True)
class StepDone(Event):
    """A step has ended. A column has one entry a rank, or is empty if the line had none.

    ``step`` is which one it was, counted from 0. An entry is None where a worker was lost. Few
    lines tell of the memory of devices.
    """

    epoch: fields.Count
    num_samples: fields.Count
    seconds: fields.Seconds
    means: fields.Means
    learning_rates: fields.Numbers
    gradient_norm: fields.Number
    ranks: fields.Counts
    loading_s: fields.Column
    forward_s: fields.Column
    backward_s: fields.Column
    waiting_s: fields.Column
    summing_s: fields.Column
    updating_s: fields.Column
    allocated_bytes: fields.OptionalCounts

    def __post_init__(self) -> None:
        num_ranks = len(self.ranks)
        columns = (*self.phases, self.allocated_bytes)
        if not set(map(len, columns)) <= {0, num_ranks}:
            raise ValueError(f"a column has not one entry for each of {num_ranks} ranks")

    @property
    def phases(self) -> tuple[fields.Column, ...]:
        """How long each rank spent in each of :data:`PHASES`, in seconds."""
        columns: tuple[fields.Column, ...] = _phases(self)
        return columns


@dataclass(frozen=True)
class Workers(Event):
    """Who computes has changed."""

    ranks: fields.Counts
    pids: fields.OptionalCounts
    lost: fields.Counts
    joined: fields.Counts
    why: fields.Texts

    @property
    def in_words(self) -> str:
        """What happened, as the file tells it; else who was lost and who has come."""
        lost = [f"worker {rank} was lost" for rank in self.lost]
        joined = [f"worker {rank} has come" for rank in self.joined]
        return "; ".join(self.why) or "; ".join([*lost, *joined]) or "others compute now"


@dataclass(frozen=True)
class WentBack(Event):
    """The steps from ``step`` on come again; ``from_step`` is how far the run had been."""

    from_step: fields.Count


@dataclass(frozen=True)
class Evaluation(Event):
    """The means over a validation set."""

    epoch: fields.Count
    means: fields.Means


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint has been asked for."""


@dataclass(frozen=True)
class Failure(Event):
    """A fit has ended with an exception."""

    rank: fields.Count
    error: fields.Text
    message: fields.Text

    @property
    def in_words(self) -> str:
        """What ended it: the exception, as Python shows it."""
        return f"{self.error or 'an exception'}: {self.message or ''}"


@dataclass(frozen=True)
class Interrupted(Failure):
    """Somebody has ended a fit."""

    by: fields.Text

    @property
    def in_words(self) -> str:
        """What ended it: who, or which signal."""
        return f"by {'Ctrl-C' if self.by == 'SIGINT' else self.by or 'a signal'}"


@dataclass(frozen=True)
class End(Event):
    """A fit has ended well."""

    seconds: fields.Seconds
    samples_per_second: fields.Seconds
    digest: fields.Text
    stopped_early: fields.Flag


_EVENTS: dict[str, type[Event]] = {
    "start": Start,
    "step": StepDone,
    "workers": Workers,
    "went_back": WentBack,
    "evaluation": Evaluation,
    "checkpoint": Checkpoint,
    "failure": Failure,
    "interrupted": Interrupted,
    "end": End,
}
_READERS = {name: fields.readers_of(event) for name, event in _EVENTS.items()}


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
    name, written = found.get("event"), found.get("format")
    if not isinstance(name, str | None):
        raise ValueError("`event` is not text")
    if name not in _EVENTS:
        return None
    if name == "start" and type(written) is int and written > FORMAT:
        raise NewerFormatError(f"written in format {written}")
    values = []
    for key, read in _READERS[name]:
        try:
            values.append(read(found.get(key)))
        except ValueError as error:
            raise ValueError(f"`{key}` {error}") from None
    return _EVENTS[name](*values)


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


@dataclass(frozen=True)
class Mark:
    """Something that happened once, at a step."""

    step: int
    time_unix_s: float
    text: str


def mark_of(event: Event) -> Mark | None:
    """Return what an event tells of that happens once; None of what is usual."""
    said = _said(event)
    return None if said is None else Mark(event.step, event.time_unix_s, said)


def _said(event: Event) -> str | None:
    match event:
        case Start(step=step, world_size=world_size) if step > 0:
            workers = f" on {plural(world_size, 'worker')}" if world_size else ""
            return f"started again at step {step}{workers}"
        case Workers():
            return event.in_words
        case WentBack(step=step, from_step=None):
            return f"went back to step {step}"
        case WentBack(step=step, from_step=int(from_step)):
            words = f"went back to step {step} from step {from_step}"
            return f"{words}: {from_step - step} came again, with the same result"
        case Interrupted():
            return f"interrupted {event.in_words}"
        case Failure(rank=rank):
            whose = "" if rank is None else f"worker {rank}: "
            return f"{whose}{event.in_words}"
        case End(step=step, stopped_early=True):
            return f"stopped early after {step} steps"
    return None

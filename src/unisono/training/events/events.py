"""What can happen in a run, as its event file records it? `docs/events.md` explains each line.

A line is untrusted: neither its size nor the types of its values are assumed. A missing field is
None, empty or NaN; a field of a type other than the one declared here makes the whole line
unreadable. Unknown events and fields are ignored.

The type of a field is annotated with its reader, which takes the value under the field's name (None
if there is none) and returns a value of the type, or raises ValueError with what is wrong.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

from unisono.runtime.notices import percent

MAX_NUMBER = 2**53  # above it, JSON readers may round integers
MAX_RANKS = 4096
MAX_SECONDS = 1e12  # more than any clock

T = TypeVar("T")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else read(value)


def _tuple_of(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    return lambda value: tuple(map(read, _list(value)))


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_RANKS:
        raise ValueError("is not a list of a sane length")
    return value


def _count(value: Any) -> int:
    # True is an int in Python, but not a count.
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError("must hold whole numbers from 0, of a sane size")
    return value


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        with suppress(OverflowError):
            return float(value)
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise ValueError("must hold numbers alone")


def _seconds(value: Any) -> float | None:
    """Read any measured number; return None for one beyond all clocks."""
    number = None if value is None else _number(value)
    return number if number is not None and abs(number) <= MAX_SECONDS else None


def _time(value: Any) -> float:
    seconds = _seconds(value)
    return math.nan if seconds is None else seconds


def _column(value: Any) -> tuple[float | None, ...]:
    times = map(_seconds, _list(value))
    return tuple(time if time is not None and time >= 0 else None for time in times)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict | None):
        raise ValueError("is not an object")
    return value or {}


def _means(value: Any) -> Mapping[str, float]:
    named = _object(value).items()
    return {name: _number(mean) for name, mean in named if not isinstance(mean, (list, dict))}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must hold text alone")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise ValueError("is not true or false")
    return bool(value)


Step: TypeAlias = Annotated[int, _count]  # every line must have one
Count: TypeAlias = Annotated[int | None, _optional(_count)]
Counts: TypeAlias = Annotated[tuple[int, ...], _tuple_of(_count)]
OptionalCounts: TypeAlias = Annotated[tuple[int | None, ...], _tuple_of(_optional(_count))]
Number: TypeAlias = Annotated[float | None, _optional(_number)]
Numbers: TypeAlias = Annotated[tuple[float, ...], _tuple_of(_number)]
Means: TypeAlias = Annotated[Mapping[str, float], _means]  # without lists and dicts
Seconds: TypeAlias = Annotated[float | None, _seconds]
Time: TypeAlias = Annotated[float, _time]  # since 1970; NaN if the line has none
Column: TypeAlias = Annotated[tuple[float | None, ...], _column]  # seconds of each rank
Object: TypeAlias = Annotated[Mapping[str, Any], _object]
Text: TypeAlias = Annotated[str | None, _optional(_text)]
Texts: TypeAlias = Annotated[tuple[str, ...], _tuple_of(_text)]
Flag: TypeAlias = Annotated[bool, _flag]


def kinds_of(event: type[Any]) -> dict[str, Any]:
    """Return the fields of an event, in order, each with its annotated type."""
    return get_type_hints(event, include_extras=True)


FORMAT = 1
PHASES = ("loading", "forward", "backward", "waiting", "summing", "updating")
_phases = attrgetter(*(f"{name}_s" for name in PHASES))


class NewerFormatError(ValueError):
    """The file was written in a format that this version does not know."""


@dataclass(frozen=True)
class Event:
    """A line of the file. ``step`` is the number of steps done by then."""

    time_unix_s: Time
    step: Step


@dataclass(frozen=True)
class Start(Event):
    """A fit begins, or begins again."""

    epoch: Count
    end_step: Count
    steps_per_epoch: Count
    batch_size: Count
    shards: Count
    world_size: Count
    ranks: Counts
    pids: OptionalCounts
    host: Text
    identity: Object
    versions: Object
    machine: Object
    command: Texts
    folder: Text
    num_parameters: Count
    loader_workers: Count


@dataclass(frozen=True)
class StepEvent(Event):
    """A step has ended. A column has one entry per rank, or is empty if the line had none.

    ``step`` is its number, counted from 0. An entry is None if a worker was lost. Only a few lines
    contain the memory of devices.
    """

    epoch: Count
    num_samples: Count
    seconds: Seconds
    means: Means
    learning_rates: Numbers
    gradient_norm: Number
    ranks: Counts
    begun_s: Column
    loading_s: Column
    forward_s: Column
    backward_s: Column
    waiting_s: Column
    summing_s: Column
    updating_s: Column
    delayed_s: Column
    allocated_bytes: OptionalCounts

    def __post_init__(self) -> None:
        num_ranks = len(self.ranks)
        columns = (self.begun_s, *self.phases, self.delayed_s, self.allocated_bytes)
        if not set(map(len, columns)) <= {0, num_ranks}:
            raise ValueError(f"a column has not one entry for each of {num_ranks} ranks")

    @property
    def phases(self) -> tuple[Column, ...]:
        """How long each rank spent in each of :data:`PHASES`, in seconds."""
        columns: tuple[Column, ...] = _phases(self)
        return columns


# The fields of a step that are numbers.
NUMBERS = [name for name, kind in kinds_of(StepEvent).items() if kind == Number]


@dataclass(frozen=True)
class Workers(Event):
    """The workers that compute have changed."""

    ranks: Counts
    pids: OptionalCounts
    lost: Counts
    joined: Counts
    why: Texts

    @property
    def in_words(self) -> str:
        """What happened, as the file says; otherwise who was lost and who has joined."""
        lost = [f"worker {rank} was lost" for rank in self.lost]
        joined = [f"worker {rank} has joined" for rank in self.joined]
        return "; ".join(self.why) or "; ".join([*lost, *joined]) or "the workers have changed"


@dataclass(frozen=True)
class WentBack(Event):
    """The steps from ``step`` on are repeated; ``from_step`` is how far the run had come."""

    from_step: Count


@dataclass(frozen=True)
class Evaluation(Event):
    """The means over a validation set."""

    epoch: Count
    means: Means


@dataclass(frozen=True)
class CheckpointRequest(Event):
    """A checkpoint was requested."""


@dataclass(frozen=True)
class Failure(Event):
    """A fit has ended with an exception."""

    rank: Count
    error: Text
    message: Text

    @property
    def in_words(self) -> str:
        """The exception that ended it, as Python shows it."""
        return f"{self.error or 'an exception'}: {self.message or ''}"


@dataclass(frozen=True)
class Interrupted(Failure):
    """Someone, or a signal, has ended a fit."""

    by: Text

    @property
    def in_words(self) -> str:
        """Who ended it, or which signal."""
        return f"by {'Ctrl-C' if self.by == 'SIGINT' else self.by or 'a signal'}"


@dataclass(frozen=True)
class End(Event):
    """A fit has ended successfully."""

    seconds: Seconds
    samples_per_second: Seconds
    digest: Text
    stopped_early: Flag


_EVENTS: dict[str, type[Event]] = {
    "start": Start,
    "step": StepEvent,
    "workers": Workers,
    "went_back": WentBack,
    "evaluation": Evaluation,
    "checkpoint": CheckpointRequest,
    "failure": Failure,
    "interrupted": Interrupted,
    "end": End,
}
_READERS = {
    name: {key: kind.__metadata__[0] for key, kind in kinds_of(event).items()}
    for name, event in _EVENTS.items()
}


def read_event(line: bytes) -> Event | None:
    """Read one line; return None for an unknown event, raise ValueError for other lines."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
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
    for key, read in _READERS[name].items():
        try:
            values.append(read(found.get(key)))
        except ValueError as error:
            raise ValueError(f"`{key}` {error}") from None
    return _EVENTS[name](*values)


class SlowdownCause(enum.Enum):
    """What makes steps slow."""

    WORKER = "slow worker"
    UNEVEN = "uneven shards"
    LOADING = "loading"
    BETWEEN = "between steps"
    BUSY = "busy machine"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One thing that makes steps slow."""

    cause: SlowdownCause
    cost: float  # as a fraction of the steps' time
    sentence: str
    remedy: str  # what to do
    rank: int | None = None  # of the slow worker; None: no single one

    @property
    def line(self) -> str:
        """The sentence, its cost and the remedy."""
        return f"{self.sentence}{self.costs}: {self.remedy}"

    @property
    def costs(self) -> str:
        """The cost, as a continuation of the sentence."""
        return f", which costs {percent(self.cost)} of the time"

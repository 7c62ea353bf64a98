"""What can happen in a run, as a line of its event file says it? `docs/events.md` explains it.

A line is untrusted: nothing is believed about its size or the types of its values. A field that is
missing is None, empty or NaN; one of another type than is written here makes the whole line
unreadable. Events and fields that are not known are passed over.

The type of a field is annotated with its reader, which takes what a line has under a name (None
where it has nothing) and returns a value of the type, or raises ValueError and says what is wrong.
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

MAX_NUMBER = 2**53  # beyond it a JSON reader may not tell neighbours apart
MAX_RANKS = 4096
MAX_SECONDS = 1e12  # no clock shows more

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
    # True is an int in Python, and no number of anything.
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
    """Read any measured number; one beyond all clocks says as little as none."""
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
Means: TypeAlias = Annotated[Mapping[str, float], _means]  # without lists and dicts of numbers
Seconds: TypeAlias = Annotated[float | None, _seconds]
Time: TypeAlias = Annotated[float, _time]  # since 1970; NaN where the line does not say
Column: TypeAlias = Annotated[tuple[float | None, ...], _column]  # seconds of each rank
Object: TypeAlias = Annotated[Mapping[str, Any], _object]
Text: TypeAlias = Annotated[str | None, _optional(_text)]
Texts: TypeAlias = Annotated[tuple[str, ...], _tuple_of(_text)]
Flag: TypeAlias = Annotated[bool, _flag]


def kinds_of(event: type[Any]) -> dict[str, Any]:
    """Name the fields of an event, in order, each with its annotated type."""
    return get_type_hints(event, include_extras=True)


FORMAT = 1
PHASES = ("loading", "forward", "backward", "waiting", "summing", "updating")
_phases = attrgetter(*(f"{name}_s" for name in PHASES))


class NewerFormatError(ValueError):
    """The file was written in a format that this version does not know."""


@dataclass(frozen=True)
class Event:
    """A line of the file. ``step`` is how many steps were done then."""

    time_unix_s: Time
    step: Step


@dataclass(frozen=True)
class Start(Event):
    """A fit, or one that starts again, begins."""

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
class StepDone(Event):
    """A step has ended. A column has one entry a rank, or is empty if the line had none.

    ``step`` is which one it was, counted from 0. An entry is None where a worker was lost. Few
    lines tell of the memory of devices.
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


# What steps have numbers of.
NUMBERS = [name for name, kind in kinds_of(StepDone).items() if kind == Number]


@dataclass(frozen=True)
class Workers(Event):
    """Who computes has changed."""

    ranks: Counts
    pids: OptionalCounts
    lost: Counts
    joined: Counts
    why: Texts

    @property
    def in_words(self) -> str:
        """What happened, as the file tells it; else who was lost and who has come."""
        lost = [f"worker {rank} was lost" for rank in self.lost]
        joined = [f"worker {rank} has come" for rank in self.joined]
        return "; ".join(self.why) or "; ".join([*lost, *joined]) or "others compute now"


@dataclass(frozen=True)
class WentBack(Event):
    """The steps from ``step`` on come again; ``from_step`` is how far the run had been."""

    from_step: Count


@dataclass(frozen=True)
class Evaluation(Event):
    """The means over a validation set."""

    epoch: Count
    means: Means


@dataclass(frozen=True)
class CheckpointRequest(Event):
    """A checkpoint has been asked for."""


@dataclass(frozen=True)
class Failure(Event):
    """A fit has ended with an exception."""

    rank: Count
    error: Text
    message: Text

    @property
    def in_words(self) -> str:
        """What ended it: the exception, as Python shows it."""
        return f"{self.error or 'an exception'}: {self.message or ''}"


@dataclass(frozen=True)
class Interrupted(Failure):
    """Somebody has ended a fit."""

    by: Text

    @property
    def in_words(self) -> str:
        """What ended it: who, or which signal."""
        return f"by {'Ctrl-C' if self.by == 'SIGINT' else self.by or 'a signal'}"


@dataclass(frozen=True)
class End(Event):
    """A fit has ended well."""

    seconds: Seconds
    samples_per_second: Seconds
    digest: Text
    stopped_early: Flag


_EVENTS: dict[str, type[Event]] = {
    "start": Start,
    "step": StepDone,
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
    """Read one line; None for an event that is not known, a ValueError if it is no such line."""
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
    """What costs time."""

    WORKER = "slow worker"
    UNEVEN = "uneven shards"
    LOADING = "loading"
    BETWEEN = "between steps"
    BUSY = "busy machine"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One thing that costs time."""

    cause: SlowdownCause
    cost: float  # of the steps' time
    sentence: str
    remedy: str  # what to do
    rank: int | None = None  # of the worker that it is about; None: no single one

    @property
    def line(self) -> str:
        """All of it."""
        return f"{self.sentence}{self.costs}: {self.remedy}"

    @property
    def costs(self) -> str:
        """What it costs, to stand behind the sentence."""
        return f", which costs {percent(self.cost)} of the time"

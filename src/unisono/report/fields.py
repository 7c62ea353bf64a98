"""Types of fields: each says what a value must be, and how it is checked.

A type is annotated with its reader, which takes what a line has under a name (None where it has
nothing) and returns a value of the type, or raises ValueError and says what is wrong. ``events.py``
describes events with these types.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

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
        try:
            return float(value)
        except OverflowError:
            raise ValueError("holds a number beyond all bounds") from None
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
    values = _list(value)
    # Nearly all are such, and a long run has millions. A sum with NaN is below nothing.
    if set(map(type, values)) == {float} and min(values) >= 0 and sum(values) <= MAX_SECONDS:
        return tuple(values)
    times = map(_seconds, values)
    return tuple(time if time is not None and time >= 0 else None for time in times)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict | None):
        raise ValueError("is not an object")
    return value or {}


def _means(value: Any) -> Mapping[str, float]:
    named = _object(value).items()
    return {name: _number(mean) for name, mean in named if not isinstance(mean, list)}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must hold text alone")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise ValueError("is not true or false")
    return bool(value)


def readers_of(record: type[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """List the fields of a dataclass that is annotated with these types, each with its reader."""
    types = get_type_hints(record, include_extras=True)
    return [(one.name, types[one.name].__metadata__[0]) for one in dataclasses.fields(record)]


Step: TypeAlias = Annotated[int, _count]  # every line must have one
Count: TypeAlias = Annotated[int | None, _optional(_count)]
Counts: TypeAlias = Annotated[tuple[int, ...], _tuple_of(_count)]
OptionalCounts: TypeAlias = Annotated[tuple[int | None, ...], _tuple_of(_optional(_count))]
Number: TypeAlias = Annotated[float | None, _optional(_number)]
Numbers: TypeAlias = Annotated[tuple[float, ...], _tuple_of(_number)]
Means: TypeAlias = Annotated[Mapping[str, float], _means]  # without metrics that are lists
Seconds: TypeAlias = Annotated[float | None, _seconds]
Time: TypeAlias = Annotated[float, _time]  # since 1970; NaN where the line does not say
Column: TypeAlias = Annotated[tuple[float | None, ...], _column]  # seconds of each rank
Object: TypeAlias = Annotated[Mapping[str, Any], _object]
Text: TypeAlias = Annotated[str | None, _optional(_text)]
Texts: TypeAlias = Annotated[tuple[str, ...], _tuple_of(_text)]
Flag: TypeAlias = Annotated[bool, _flag]

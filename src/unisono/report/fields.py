"""What stands in a field of a line, if it is of the type that it must be?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unisono.report.events import Column

MAX_NUMBER = 2**53  # beyond it a JSON reader may not tell neighbours apart
MAX_RANKS = 4096
MAX_SECONDS = 1e12  # no clock shows more

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Fields:
    """The fields of one line. Final.

    What is not there, or null, is None or empty; what is there with another type raises ValueError.

    Args:
        line: a JSON object.
    """

    def __init__(self, line: Mapping[str, Any]) -> None:
        self._line = line

    def time_unix_s(self) -> float:
        """Read when the line was written; NaN where it does not say."""
        seconds = self.seconds("time_unix_s")
        return math.nan if seconds is None else seconds

    def step(self) -> int:
        """Read the step, which every line must have."""
        step = self.count("step")
        if step is None:
            raise ValueError("no `step`")
        return step

    def whole(self, key: str) -> int | None:
        """Read a whole number."""
        value = self._line.get(key)
        if value is None:
            return None
        # True is an int in Python, and no number of anything.
        if type(value) is not int or abs(value) > MAX_NUMBER:
            raise ValueError(f"`{key}` is not a whole number of a sane size")
        return value

    def count(self, key: str) -> int | None:
        """Read a whole number from 0."""
        value = self.whole(key)
        if value is not None and value < 0:
            raise ValueError(f"`{key}` is below 0")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """Read several of them."""
        return tuple(_count(value, key) for value in self._list(key))

    def optional_counts(self, key: str) -> tuple[int | None, ...]:
        """Read several of them; None where one is not known."""
        return tuple(None if one is None else _count(one, key) for one in self._list(key))

    def number(self, key: str) -> float | None:
        """Read a number, which may be NaN or infinite."""
        value = self._line.get(key)
        return None if value is None else _number(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read several of them."""
        return tuple(map(_number, self._list(key)))

    def numbers_by_name(self, key: str) -> Mapping[str, float]:
        """Read several of them, each with its name; a metric that is a list is passed over."""
        values = self.mapping(key).items()
        return {name: _number(value) for name, value in values if not isinstance(value, list)}

    def seconds(self, key: str) -> float | None:
        """Read a time, or any measured number; one beyond all clocks says as little as none."""
        value = self.number(key)
        return value if value is not None and abs(value) <= MAX_SECONDS else None

    def column(self, key: str, num_ranks: int) -> Column:
        """Read a time for each rank; empty where the line has none."""
        values = self._list(key)
        if not values:
            return ()
        if len(values) != num_ranks:
            raise ValueError(f"`{key}` has not one entry for each of {num_ranks} ranks")
        # Nearly all are such, and a long run has millions. A sum with NaN is below nothing.
        if set(map(type, values)) == {float} and min(values) >= 0 and sum(values) <= MAX_SECONDS:
            return tuple(values)
        return tuple(map(_entry, values))

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Read an object of whatever it holds."""
        value = self._line.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"`{key}` is not an object")
        return value

    def text(self, key: str) -> str | None:
        """Read text."""
        value = self._line.get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"`{key}` is not text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Read several of them."""
        values = self._list(key)
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"`{key}` does not hold text alone")
        return tuple(values)

    def is_true(self, key: str) -> bool:
        """Read whether something is so; it is not where the line does not say."""
        value = self._line.get(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"`{key}` is not true or false")
        return value

    def _list(self, key: str) -> list[Any]:
        value = self._line.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > MAX_RANKS:
            raise ValueError(f"`{key}` is not a list of a sane length")
        return value


def _count(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"`{key}` does not hold numbers alone")
    return value


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


def _entry(value: Any) -> float | None:
    if value is None:
        return None
    number = _number(value)
    return number if 0 <= number <= MAX_SECONDS else None

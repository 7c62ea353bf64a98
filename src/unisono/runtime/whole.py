"""Whole numbers and flags from callers, of any type that represents them."""

from __future__ import annotations

import operator
from typing import Any


def check_whole(name: str, value: Any, *, at_least: int, below: int | None = None) -> int:
    """Return an argument as an int; raise unless it is a whole number in range."""
    example = f"pass `{name}={max(at_least, 1)}`, for example"
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a whole number, but is {value!r}: {example}.") from None
    if whole < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, but is {whole}: {example}.")
    if below is not None and whole >= below:
        raise ValueError(f"`{name}` must be below {below}, but is {whole}: {example}.")
    return whole


def check_flag(name: str, value: Any, *, none: str = "") -> None:
    """Raise unless an argument is True or False; None is allowed if `none` says what it means."""
    if value is None and none:
        return
    is_of_numpy = type(value).__module__ == "numpy"  # which the launcher does not load
    if not (isinstance(value, int) or is_of_numpy) or value not in (0, 1):
        or_none = f" (None: {none})" if none else ""
        raise TypeError(
            f"`{name}` must be True or False{or_none}, but is {value!r}: pass `{name}=True`."
        )

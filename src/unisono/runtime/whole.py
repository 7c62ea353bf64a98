"""Whole numbers from callers, of any integer type."""

from __future__ import annotations

import operator
from typing import Any


def check_whole(name: str, value: Any, *, at_least: int, below: int | None = None) -> int:
    """Refuse anything but a whole number of the right size, and give it as an int."""
    example = f"pass `{name}={max(at_least, 1)}`, say"
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

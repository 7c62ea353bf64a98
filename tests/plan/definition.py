"""The sum over shards as the design defines it, written without the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def sum_by_definition(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """T[lo,hi) = T[lo,mid) + T[mid,hi), mid = lo + the largest power of two below hi - lo."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return add(sum_by_definition(values[:half], add), sum_by_definition(values[half:], add))

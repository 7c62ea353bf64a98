"""Many steps of an event file, read together where all of them are as usual.

What one field has in all lines is looked at in one go: which types, how large. Values of the type
that JSON gives, within bounds, are taken as they are; others go through their reader, one by one.
Invariant: it gives what :func:`read_event` gives for each line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from types import NoneType
from typing import Any, get_type_hints

from unisono.training.events import events
from unisono.training.events.events import MAX_NUMBER, MAX_RANKS, MAX_SECONDS, StepDone


def _are_counts(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_NUMBER


def _are_floats(values: Iterable[Any]) -> bool:
    return set(map(type, values)) == {float}


def _are_times(values: Sequence[Any]) -> bool:
    # A sum with NaN is below nothing.
    return _are_floats(values) and min(values) >= 0 and sum(values) <= MAX_SECONDS


# Values that no reader changes, where all are so.
_PLAIN = {
    events.Step: _are_counts,
    events.Count: _are_counts,
    events.Number: _are_floats,
    events.Seconds: _are_times,
    events.Time: _are_times,
}
_PLAIN_ENTRIES = {
    events.Counts: _are_counts,
    events.OptionalCounts: _are_counts,
    events.Numbers: _are_floats,
    events.Column: _are_times,
}
_FIELDS = get_type_hints(StepDone, include_extras=True)
_NAMES = [*_FIELDS]
_BY_RANK = _NAMES.index("ranks")  # from there on a field has one entry a rank, or none
_decode = json.JSONDecoder().raw_decode


def read_steps(lines: Sequence[bytes]) -> list[StepDone] | None:
    """Read lines that begin as a step's does, each with its newline.

    Returns:
        The steps, or None if each line must be read by itself.
    """
    try:
        texts = [line.decode() for line in lines]
        found = [_decode(text) for text in texts]
        rows = [row for row, _ in found]
        columns = [_read_all([row.get(name) for row in rows], _FIELDS[name]) for name in _NAMES]
    except (ValueError, RecursionError):
        return None
    are_whole = [end + 1 for _, end in found] == [*map(len, texts)]
    if not are_whole or any(row.get("event") != "step" for row in rows):
        return None
    num_ranks, *lengths = ([*map(len, column)] for column in columns[_BY_RANK:])
    for one in lengths:
        if one != num_ranks and any(n and n != num for n, num in zip(one, num_ranks, strict=True)):
            return None
    return [_step(values) for values in zip(*columns, strict=True)]


def _read_all(values: list[Any], kind: Any) -> list[Any]:
    """Read what lines have of one field."""
    (read,) = kind.__metadata__
    types = set(map(type, values))
    if types == {NoneType}:
        return [read(None)] * len(values)
    if kind in _PLAIN and _PLAIN[kind](values):
        return values
    if kind is events.Means and types == {dict}:
        means = chain.from_iterable(map(dict.values, values))
        return values if _are_floats(means) else list(map(read, values))
    if kind in _PLAIN_ENTRIES and types == {list} and max(map(len, values)) <= MAX_RANKS:
        entries = list(chain.from_iterable(values))
        if _PLAIN_ENTRIES[kind](entries):
            return list(map(tuple, values))
    return list(map(read, values))


def _step(values: Iterable[Any]) -> StepDone:
    step = object.__new__(StepDone)
    step.__dict__.update(zip(_NAMES, values))  # noqa: B905  # half of what `__init__` takes
    return step

"""Texts that people write for times, bytes, bandwidths and numbers of workers, as numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

TIMES_S = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0
}  # fmt: skip
BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip
BYTES_PER_S = {f"{unit}/s": size for unit, size in BYTES.items()} | {
    f"{prefix}bit/s": 1e3**power / 8 for power, prefix in enumerate(("", "k", "M", "G", "T"))
}
MAX_WORKERS = 100_000
_MAX_COUNTS = 64
_FORM = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([^\s0-9.][^\s]*)\s*")
_DOTS = ("…", "...")


def quantity(text: str, units: Mapping[str, float], *, may_be_zero: bool = False) -> float:
    """Read a number with its unit, such as ``7.2s`` or ``10 Gbit/s``.

    Args:
        text: what was written.
        units: what each unit is worth.
        may_be_zero: whether 0 is allowed.

    Raises:
        ValueError: it is no such text, or not above 0.
    """
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(text)
    number = float(match[1]) * units[match[2]]
    if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
        raise ValueError(text)
    return number


def share(text: str) -> float:
    """Read a share below 1, as ``5%`` or ``0.05``; raises ValueError."""
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number < 1:
        raise ValueError(text)
    return number


def whole(text: str) -> int:
    """Read a whole number of at least 1, also as ``1.28e6``; raises ValueError."""
    number = float(text)
    if not 1 <= number < 2**63 or number != int(number):
        raise ValueError(text)
    return int(number)


def counts(text: str) -> tuple[int, ...]:
    """Read numbers of workers, ascending: ``1,2,8``, ``1,2,4,…,1024`` or ``1,2,3,...,8``.

    Dots go on as the two numbers before them do: by a factor if that is whole, else by a term.

    Raises:
        ValueError: it is no such list, or too long.
    """
    words = [word.strip() for word in text.split(",")]
    found: list[int] = []
    for at, word in enumerate(words):
        if word in _DOTS:
            if at + 2 != len(words) or len(found) < 2:
                raise ValueError(text)
            found += _between(found, whole(words[-1]))
        else:
            found.append(whole(word))
    ascending = tuple(sorted(set(found)))
    if len(ascending) > _MAX_COUNTS or ascending[-1] > MAX_WORKERS:
        raise ValueError(text)
    return ascending


def _between(before: list[int], last: int) -> list[int]:
    factor, term = before[-1] / before[-2], before[-1] - before[-2]
    if term < 1 or last <= before[-1]:
        raise ValueError(before)
    found: list[int] = []
    number = before[-1]
    while len(found) <= _MAX_COUNTS:
        number = number * int(factor) if factor.is_integer() else number + term
        if number >= last:
            break
        found.append(number)
    return found

"""Words for quantities: counts, sizes, times and shares, each in one way wherever they are shown.

Sizes are binary (1 GiB is 2**30 bytes), as in torch's own messages about memory.
"""

from __future__ import annotations

import math

UNKNOWN = "–"


def count(number: float) -> str:
    """Write a count with its thousands apart."""
    return f"{number:,.0f}".replace(",", "\u202f") if abs(number) < 1e12 else f"{number:.3g}"


def plural(number: int, word: str) -> str:
    """Write a count with its noun."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def amount(number: float | None) -> str:
    """Write a measured value with a few digits."""
    if number is None:
        return UNKNOWN
    if not math.isfinite(number):
        return {math.inf: "∞", -math.inf: "−∞"}.get(number, "NaN")
    return count(number) if 1e4 <= abs(number) < 1e12 else f"{number:.4g}"


def percent(share: float) -> str:
    """Write a share as people do."""
    return f"{share * 100:.0f} %"


def size(num_bytes: float | None) -> str:
    """Write a number of bytes, such as ``310 MiB``, in at most eight cells."""
    if num_bytes is None:
        return UNKNOWN
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def duration(seconds: float | None) -> str:
    """Write a time in the units that one would say it in."""
    if seconds is None or not 0 <= seconds < math.inf:
        return UNKNOWN  # clocks are put back at times
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"

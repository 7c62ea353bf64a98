"""What is left of a program's state without its tensors, which older loops no longer keep.

The program takes the same course again by its variables and plain values: a limit that a loop has
reached, a count, the numbers of the last step. What has tensors stays as the program makes it.
"""

from __future__ import annotations

from typing import Any

_TENSORS = {"$tensor", "$array"}  # marks of `packing.py`


def without_tensors(packed: Any) -> dict[str, Any] | None:
    """Return a program's packed state without values that have tensors; None if it has no form."""
    places = packed.get("values") if isinstance(packed, dict) else None
    if not isinstance(places, dict):
        return None
    values, lost = dict[str, Any](), list[str]()
    for key, parts in places.items():
        slots = parts.get("slots") if isinstance(parts, dict) else None
        if isinstance(slots, dict):
            gone = [name for name, part in slots.items() if _has_tensors(part)]
            left = {name: part for name, part in slots.items() if name not in gone}
            values[key] = {**parts, "slots": left, "rest": [*parts.get("rest", ()), *gone]}
        elif _has_tensors(parts):
            lost.append(key)
        else:
            values[key] = parts
    return {**packed, "replaced": [], "values": values, "lost": lost, "drawn": None}


def _has_tensors(part: Any) -> bool:
    if isinstance(part, list):
        return any(map(_has_tensors, part))
    if not isinstance(part, dict):
        return False
    return not _TENSORS.isdisjoint(part) or any(map(_has_tensors, part.values()))

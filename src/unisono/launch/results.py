"""How does what a worker's function returned get to the caller? As pickled values."""

from __future__ import annotations

from typing import Any

from unisono.launch.culprit import is_of_the_caller, way_to_culprit


def pack_result(result: Any) -> bytes:
    """Pickle what a worker's function returned.

    Raises:
        TypeError: something in it cannot be pickled; the message names it.
    """
    from unisono.launch.pickling import dumps

    try:
        return dumps(result)
    except Exception as error:
        way = way_to_culprit([("the value", result)])
        raise TypeError(
            f"what a worker returns must be picklable, but {' → '.join(way) or 'it'} is not "
            f"({error}): return numbers, tensors, or what is made of them, or nothing."
        ) from (error if is_of_the_caller(error) else None)


def unpack_result(packed: bytes) -> Any:
    """Build what :func:`pack_result` packed; None where there is nothing."""
    from unisono.launch.pickling import load

    return load(packed) if packed else None  # it left by `sys.exit(0)`

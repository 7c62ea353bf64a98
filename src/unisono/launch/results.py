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


def unpack_result(packed: bytes, rank: int) -> Any:
    """Build what :func:`pack_result` packed on worker `rank`; None where there is nothing.

    Raises:
        TypeError: it cannot be built here.
    """
    from unisono.launch.pickling import load

    if not packed:  # it left by `sys.exit(0)`
        return None
    try:
        return load(packed)
    except Exception as error:
        raise TypeError(
            f"what worker {rank} returned cannot be built here ({error}): return numbers, tensors, "
            f"or what is made of them, or let its module be imported here as it is in workers."
        ) from error

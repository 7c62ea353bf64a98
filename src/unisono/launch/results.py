"""How does what a worker's function returned get to the caller? As pickled values.

Invariant: a class that the caller knows stays as it is. Pickled by value, a class brings its
attributes and methods along, as the worker saw them; the caller may have set others since.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from unisono.launch.culprit import is_of_the_caller, way_to_culprit


def pack_result(result: Any) -> bytes:
    """Pickle what a worker's function returned.

    Raises:
        TypeError: something in it cannot be pickled; the message names it.
    """
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(result)
    except Exception as error:
        way = way_to_culprit([("the value", result)])
        raise TypeError(
            f"what a worker returns must be picklable, but {' → '.join(way) or 'it'} is not "
            f"({error}): return numbers, tensors, or what is made of them, or nothing."
        ) from (error if is_of_the_caller(error) else None)
    return packed


def unpack_result(packed: bytes) -> Any:
    """Build what :func:`pack_result` packed; None where there is nothing."""
    return load(packed) if packed else None  # it left by `sys.exit(0)`


def load(packed: bytes) -> Any:
    """Unpickle what a worker has pickled; only classes that are new here get what it brings."""
    from cloudpickle import cloudpickle

    with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        known = set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)

    def set_if_new(cls: type, state: object) -> object:
        return cls if cls in known else cloudpickle._class_setstate(cls, state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            found = super().find_class(module_name, global_name)
            return set_if_new if found is cloudpickle._class_setstate else found

    return Unpickler(io.BytesIO(packed)).load()

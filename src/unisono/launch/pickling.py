"""How do values travel between a caller and workers? As cloudpickle has it, and a little more.

Functions and classes of a script or a notebook go by value, what modules define by name. Beside
that:

* what goes by value out of ``__main__`` is noted, so that a worker's ``__main__`` can hold it;
* a class that is known where it arrives stays as it is there. Pickled by value, it brings its
  attributes and methods along, as they were elsewhere; there they may have been set anew since.

Loads cloudpickle, which nobody needs before the first call.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

from cloudpickle import cloudpickle


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, and the above. Final.

    Attributes:
        of_main: functions and classes of ``__main__`` that went by value, by their qualified names.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        """Say how to pickle what is neither a number, a text, nor a plain container of such."""
        is_defined = isinstance(value, (type, FunctionType))
        if is_defined and getattr(value, "__module__", None) == "__main__":
            self._note(value)
        return super().reducer_override(value)

    def _note(self, value: Any) -> None:
        name = value.__qualname__
        # An older one of the same name may travel, too.
        if getattr(sys.modules["__main__"], name, None) is value:
            self.of_main[name] = value
        else:
            self.of_main.setdefault(name, value)


def dumps(value: Any) -> bytes:
    """Pickle a value.

    Raises:
        Exception: it cannot be pickled; classes may raise anything then.
    """
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def load(packed: bytes) -> Any:
    """Unpickle a value; only classes that are new here get what they bring."""
    with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        known = set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)

    def set_if_new(cls: type, state: object) -> object:
        return cls if cls in known else cloudpickle._class_setstate(cls, state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            found = super().find_class(module_name, global_name)
            return set_if_new if found is cloudpickle._class_setstate else found

    return Unpickler(io.BytesIO(packed)).load()

"""How are values pickled between a caller and workers? By cloudpickle, with some additions.

cloudpickle pickles functions and classes of scripts and notebooks by value, others by name. Also:

* a function with a `functools` cache is pickled with an empty cache;
* a module with a special class of torch's, such as ``torch.backends.cudnn``, is pickled by name;
* values pickled from ``__main__`` are recorded, so that a worker's ``__main__`` can contain them;
* a class that the receiver already knows keeps the attributes and methods that it has there;
* large arrays and tensors can be sent outside of the pickle, without a copy (PEP 574).

Imports cloudpickle, which is not needed before the first call.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any, final

from cloudpickle import cloudpickle

_LARGE_BYTES = 1 << 20  # smaller buffers are pickled
_Cached = type(functools.cache(len))


@final
class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with the additions; large buffers go to `buffers` if given."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer] | None = None) -> None:
        def put(buffer: pickle.PickleBuffer) -> bool:
            if buffers is None or buffer.raw().nbytes < _LARGE_BYTES:
                return True  # pickle it
            buffers.append(buffer)
            return False

        super().__init__(file, buffer_callback=put)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value that is neither a number, a string nor a plain container."""
        is_defined = isinstance(value, (type, FunctionType, _Cached))
        if is_defined and getattr(value, "__module__", None) == "__main__":
            self._note(value)
        reduced = _reduced(value)
        return super().reducer_override(value) if reduced is None else reduced

    def _note(self, value: Any) -> None:
        name = getattr(value, "__qualname__", "")  # the cache of a callable object has no name
        # An older value of the same name may be pickled as well.
        if getattr(sys.modules["__main__"], name, None) is value:
            self.of_main[name] = value
        else:
            self.of_main.setdefault(name, value)


def dumps(value: Any) -> bytes:
    """Pickle a value."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def load(packed: bytes, buffers: Iterable[Any] = ()) -> Any:
    """Unpickle a value over its buffers' memory; classes that are already known are unchanged."""
    with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        known = set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)

    def set_if_new(cls: type, state: object) -> object:
        return cls if cls in known else cloudpickle._class_setstate(cls, state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            found = super().find_class(module_name, global_name)
            return set_if_new if found is cloudpickle._class_setstate else found

    return Unpickler(io.BytesIO(packed), buffers=buffers).load()


def _reduced(value: Any) -> tuple[Any, ...] | None:
    """Return how to rebuild `value`; None if cloudpickle knows how."""
    if isinstance(value, _Cached):
        made_by = (value.__wrapped__, *value.cache_parameters().values())
        is_found = cloudpickle._lookup_module_and_qualname(value) is not None
        return None if is_found else (_cached, made_by)
    if type(value) is functools.cached_property:
        return functools.cached_property, (value.func,), {"attrname": value.attrname}
    storages: Any = sys.modules.get("torch.storage")
    if storages is not None and isinstance(value, storages.TypedStorage):
        parts = {"wrap_storage": value._untyped_storage, "dtype": value.dtype}
        return functools.partial(storages.TypedStorage, **parts, _internal=True), ()
    if storages is not None and isinstance(value, storages.UntypedStorage):
        return _reduced_storage(value)
    if isinstance(value, ModuleType) and type(value) is not ModuleType:
        is_loaded = sys.modules.get(value.__name__) is value
        return (importlib.import_module, (value.__name__,)) if is_loaded else None
    return None


def _reduced_storage(storage: Any) -> tuple[Any, ...] | None:
    import torch

    from unisono.runtime.device import HOST

    if storage.device.type != HOST:
        return None
    elements: Any = torch.empty(0, dtype=torch.uint8, device=HOST).set_(storage)
    return _untyped, (pickle.PickleBuffer(elements.numpy()),)


def _untyped(buffer: Any) -> Any:
    """Return a storage: a view of memory sent outside of the pickle, else a copy."""
    import torch

    elements = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.ByteTensor()
    is_pickled = isinstance(buffer, (bytes, bytearray))
    return (elements.clone() if is_pickled else elements).untyped_storage()


def _cached(fn: Callable[..., Any], maxsize: int | None, typed: bool) -> Callable[..., Any]:
    return functools.lru_cache(maxsize, typed)(fn)

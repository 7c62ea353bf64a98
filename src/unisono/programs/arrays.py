"""Arrays and scalars of numpy, whatever their dtype and class: their bits, and their parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NUMBERS = {dtype.name: dtype for dtype in map(np.dtype, "?efdbhilBHIL")}
"""The dtypes that checkpoints hold, by name: truth values, floats of 16 to 64 bits, integers."""
_HAS_GAPS = np.finfo(np.longdouble).nmant == 63  # of x86: 10 bytes, in 12 or 16
_USED = {
    kind: np.dtype(
        {
            "names": [*map(str, offsets)],
            "formats": ["V10"] * len(offsets),
            "offsets": offsets,
            "itemsize": np.dtype(kind).itemsize,
        }
    )
    for kind, offsets in {"g": [0], "G": [0, np.dtype("g").itemsize]}.items()
    if _HAS_GAPS
}
_TEXTS = "StringDType"
_STRINGS: Any = getattr(np.dtypes, _TEXTS, ())  # since numpy 2


def is_of_numbers(value: Any) -> bool:
    """Return whether a value is a plain array whose elements checkpoints hold as they are."""
    return type(value) is np.ndarray and value.dtype.name in NUMBERS and value.dtype.isnative


def bits(array: np.ndarray) -> bytes:
    """Return the bytes of the elements, and zeros where an element has bytes that nobody sets."""
    if array.dtype.names is None and array.dtype.char not in _USED:
        return array.tobytes()
    made = np.zeros(array.shape, array.dtype)
    _copy_bits(made, array)
    return made.tobytes()


def _copy_bits(there: np.ndarray, array: np.ndarray) -> None:
    used = _USED.get(array.dtype.char) if array.dtype.isnative else None
    if used is not None:
        there, array = there.view(used), array.view(used)
    if array.dtype.names is None:
        there[...] = array
    for name in array.dtype.names or ():
        _copy_bits(there[name], array[name])


def elements(array: np.ndarray) -> np.ndarray:
    """View the elements of an array of any class as a plain array."""
    return np.ndarray.view(array, np.ndarray)


def has_text(dtype: np.dtype) -> bool:
    """Return whether a dtype can be made of its `str`."""
    try:
        return np.dtype(dtype.str) == dtype
    except TypeError:
        return False


def parts_of_dtype(dtype: np.dtype) -> Sequence[Any]:
    """Return the parts of a dtype; raises TypeError for a dtype that cannot be made of any."""
    if has_text(dtype):
        return [dtype.str]
    if dtype.subdtype is not None:
        return dtype.subdtype
    if isinstance(dtype, _STRINGS) and not hasattr(dtype, "na_object"):
        return [_TEXTS, dtype.coerce]
    if dtype.names is None:
        raise TypeError(f"{dtype!r} cannot be made of its text")
    fields: list[Any] = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    given = {
        "names": [*dtype.names],
        "formats": [field[0] for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }
    return [given, issubclass(dtype.type, np.record)]


def dtype_of(of: Any, *rest: Any) -> np.dtype:
    """Make a dtype of its parts."""
    kind: Any = np.dtype
    if isinstance(of, str) and of == _TEXTS:
        return _STRINGS(coerce=rest[0])  # type: ignore[no-any-return]
    if isinstance(of, dict):
        return kind((np.record, kind(of))) if rest[0] else kind(of)  # type: ignore[no-any-return]
    return kind((of, *rest)) if rest else kind(of)  # type: ignore[no-any-return]


def parts_of_array(array: np.ndarray) -> Sequence[Any]:
    """Return the dtype, the shape, and each field, all objects, or the bits of a plain array."""
    if array.dtype.names is not None:
        return array.dtype, array.shape, *(array[name].copy() for name in array.dtype.names)
    if array.dtype.hasobject:
        return array.dtype, array.shape, array.reshape(-1).tolist()
    return array.dtype, array.shape, bits(array)


def array_of(dtype: np.dtype, shape: tuple[int, ...], *content: Any) -> np.ndarray:
    """Make an array of its parts; raises ValueError if they do not fit."""
    made: Any
    if dtype.names is None and not dtype.hasobject and content[0]:
        return np.frombuffer(content[0], dtype).reshape(shape).copy()
    lengths = [len(each) if dtype.names is None else each.size for each in content]
    # A file must not decide how much memory is taken.
    if dtype.itemsize and min(lengths, default=0) < math.prod(shape):
        raise ValueError(f"an array of shape {shape} has other elements")
    made = np.zeros(shape, dtype)
    if dtype.names is not None:
        for name, field in zip(dtype.names, content, strict=True):
            made[name] = field
    elif dtype.hasobject:
        for at, value in enumerate(content[0]):
            made.flat[at] = value
    return made  # type: ignore[no-any-return]

"""How does a frozen dataclass travel between processes? As JSON, checked against its annotations.

Nothing is unpickled, nothing but the named class and those of its fields is ever made, and what
does not fit is refused with a sentence. Fields may be of plain types, tuples of one type, mappings
(any JSON object), other such dataclasses, and these or None.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def fields_of(value: Any) -> dict[str, Any]:
    """Take a dataclass apart into what JSON can hold; mappings are copied as they are."""
    return {
        name: fields_of(found) if dataclasses.is_dataclass(found) else found
        for name in types_of(type(value))
        for found in (getattr(value, name),)
    }


def from_fields(kind: type[T], fields: Any) -> T:
    """Put a dataclass together again.

    Raises:
        ValueError: a field is missing, is one too many, or is not of its type.
    """
    wanted = types_of(kind)
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        seen = ", ".join(map(str, fields)) if isinstance(fields, dict) else repr(fields)
        raise ValueError(
            f"{kind.__name__} must have the fields ({', '.join(wanted)}), but has ({seen}): "
            "both ends must be of the same version."
        )
    return kind(
        **{name: _checked(fields[name], type_, kind, name) for name, type_ in wanted.items()}
    )


def _types_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# Finds the type of each field of a dataclass, by name and in order.
types_of: Callable[[Any], dict[str, Any]] = functools.cache(_types_of)


def _checked(value: Any, type_: Any, kind: type[Any], name: str) -> Any:
    """Give `value` as the type that a field must have."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if type_ is Any or type(value) is type_ or (value is None and types.NoneType in arguments):
        return value
    if origin is types.UnionType:
        return _checked(value, arguments[0], kind, name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_checked(item, arguments[0], kind, name) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return value
    if type_ is float and type(value) is int:
        return float(value)
    if dataclasses.is_dataclass(type_):
        return from_fields(typing.cast("type[Any]", type_), value)
    raise ValueError(
        f"`{name}` of {kind.__name__} must be of type {getattr(type_, '__name__', type_)}, but is "
        f"{value!r}: both ends must be of the same version."
    )

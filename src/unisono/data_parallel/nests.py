"""Tensors inside of tuples, named tuples, lists and dicts, however deep, as torch finds them.

Anything else is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def is_named_tuple(nest: object) -> bool:
    """Tell whether something is of a type made by ``collections.namedtuple``."""
    return isinstance(nest, tuple) and hasattr(nest, "_asdict") and hasattr(nest, "_fields")


def tensors_in(nest: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Find all tensors, each with where it is, such as ``"[0]['mask']"``."""
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, (list, tuple)):
        for position, value in enumerate(nest):
            yield from tensors_in(value, f"{path}[{position}]")
    elif isinstance(nest, dict):
        for key, value in nest.items():
            yield from tensors_in(value, f"{path}[{key!r}]")


def mapped(nest: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Make a nest of the same kind with every tensor replaced."""
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, (list, tuple)):
        return rebuilt(nest, (mapped(value, function) for value in nest))
    if isinstance(nest, dict):
        return like_dict(nest, [(key, mapped(value, function)) for key, value in nest.items()])
    return nest


def rebuilt(nest: Any, values: Iterable[Any]) -> Any:
    """Make a tuple, named tuple or list of the same type from other values."""
    return type(nest)(*values) if is_named_tuple(nest) else type(nest)(values)


def like_dict(nest: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dict of the same type from pairs, where that can be made of them."""
    pairs = list(pairs)
    try:
        return type(nest)(pairs)
    except TypeError:  # a defaultdict, say
        return dict(pairs)

"""Tells a model's own state dict from that of the DDP or DataParallel around it.

Both keep their model under the name ``module``, so their state dicts have ``module.fc.weight``
where the model's have ``fc.weight``. The model may have parts called ``module`` itself, so the
reading that finds more of the model counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

PREFIX = "module."


def name_as_wrapped(state_dict: Any, model: torch.nn.Module) -> Any:
    """Put ``module.`` before the names of a state dict that is the model's own."""
    if isinstance(state_dict, Mapping) and is_without_prefix(state_dict, model.state_dict()):
        return _with_prefix(state_dict)
    return state_dict


def name_part_as_wrapped(state_dict: dict[str, Any], prefix: str, model: torch.nn.Module) -> None:
    """Do so in place with the part of a larger module's state dict that begins with `prefix`."""
    ours = [name for name in state_dict if name.startswith(prefix)] if prefix else []
    given = {name.removeprefix(prefix): state_dict[name] for name in ours}
    if is_without_prefix(given, model.state_dict()):
        for name in ours:
            del state_dict[name]
        state_dict.update((prefix + PREFIX + name, value) for name, value in given.items())


def is_without_prefix(given: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Tell whether a state dict is the model's own.

    Args:
        given: the state dict.
        model: the state dict of the model that it is for, without the prefix.

    Returns:
        True if more of its names, or as many with more of the shapes, are found without the
        prefix. Both readings equally good: False, which is what torch does.
    """
    with_prefix = (
        (name.removeprefix(PREFIX), value)
        for name, value in given.items()
        if name.startswith(PREFIX)
    )
    return _found(given.items(), model) > _found(with_prefix, model)


def _found(given: Iterable[tuple[str, Any]], model: Mapping[str, Any]) -> tuple[int, int]:
    names = shapes = 0
    for name, value in given:
        if name in model:
            names += 1
            shapes += _shape(value) == _shape(model[name])
    return names, shapes


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _with_prefix(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put ``module.`` before all names, also in the versions that torch keeps beside them."""
    renamed = OrderedDict((PREFIX + name, value) for name, value in state_dict.items())
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        module = PREFIX.removesuffix(".")
        renamed._metadata = {  # type: ignore[attr-defined]
            f"{PREFIX}{name}" if name else module: value for name, value in versions.items()
        }
    return renamed

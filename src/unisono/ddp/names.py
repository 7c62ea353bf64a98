"""Tells a model's own state dict from that of the DDP around it.

DDP keeps its model under the name ``module``, so its state dicts have ``module.fc.weight`` where
the model's have ``fc.weight``. The model may have parts called ``module`` itself, so the reading
that finds more of the model counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

PREFIX = "module."


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

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
_Module: Any = torch.nn.Module  # whose parts have no types of their own


class LoadsWithoutPrefix(_Module):  # type: ignore[misc]
    """A module around a model that also loads the model's own state dicts. An interface."""

    module: torch.nn.Module

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load parameters and buffers by names with or without ``module.`` at the front.

        Which of the two is meant is told by which finds more of the model's names (then shapes).
        Arguments, result and errors are torch's.
        """
        is_mapping = isinstance(state_dict, Mapping)
        if is_mapping and is_without_prefix(state_dict, self.module.state_dict()):
            state_dict = _with_prefix(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Do the same as a part of a larger module, given a dict that is ours to change."""
        ours = [name for name in state_dict if name.startswith(prefix)] if prefix else []
        given = {name.removeprefix(prefix): state_dict[name] for name in ours}
        if is_without_prefix(given, self.module.state_dict()):
            for name in ours:
                del state_dict[name]
            state_dict.update((prefix + PREFIX + name, value) for name, value in given.items())
        super()._load_from_state_dict(state_dict, prefix, *rest)


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

"""Which parameters have ``requires_grad=False``, and which layers are in ``eval()``.

A program may change both during training, and what passes compute depends on them, so they are kept
with a run. Usually there are few, so only those are named.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.state.contents import named_parameters

_NAMES_AT_MOST = 3  # in a message


def modes_of(model: nn.Module, optimizer: Optimizer) -> dict[str, list[str]]:
    """Name the parameters that are fixed, and the layers that evaluate; plain JSON."""
    named = named_parameters(model, optimizer)
    return {
        "fixed": [name for name, parameter in named.items() if not parameter.requires_grad],
        "evaluating": [name for name, module in model.named_modules() if not module.training],
    }


def told_modes(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Put what :func:`modes_of` names in a few words, which differ if the names do."""
    modes = modes_of(model, optimizer)
    return {
        "the parameters with `requires_grad=False`": _told(modes["fixed"]),
        "the layers in `eval()`": _told(modes["evaluating"]),
    }


def apply_modes(modes: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Set parameters and layers as :func:`modes_of` has named them; empty: leave all alone."""
    if not modes:
        return
    fixed, evaluating = set(modes["fixed"]), set(modes["evaluating"])
    for name, parameter in named_parameters(model, optimizer).items():
        if parameter.requires_grad == (name in fixed):
            parameter.requires_grad_(name not in fixed)
    for name, module in model.named_modules():
        if module.training == (name in evaluating):
            module.training = name not in evaluating


def are_modes(said: Any) -> bool:
    """Tell whether a value from a file has the form that :func:`modes_of` gives, or is {}."""
    return isinstance(said, dict) and (
        not said
        or (
            said.keys() == {"fixed", "evaluating"}
            and all(isinstance(names, list) for names in said.values())
            and all(isinstance(name, str) for names in said.values() for name in names)
        )
    )


def _told(names: list[str]) -> str:
    if len(names) <= _NAMES_AT_MOST:
        return ", ".join(f"`{name or 'model'}`" for name in names) or "none"
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"`{names[0] or 'model'}` to `{names[-1]}` ({len(names)}, {digest})"

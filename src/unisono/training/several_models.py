"""A run of several models, optimizers or devices: what it accepts, and how its parts see it.

Models become the children of one, under their names, so parameters, buffers and checkpoints are
those of one model. Optimizers become one that has all their state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.state.contents import named_parameters
from unisono.engine.state.optimizers import SeveralOptimizers, optimizers_of
from unisono.training.options import PER_OPTIMIZER, RunOptions

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer]


def joined(model: Models, optimizer: Optimizers) -> tuple[nn.Module, Optimizer]:
    """Return one model and one optimizer made of several; raise if they cannot be joined."""
    if isinstance(optimizer, Mapping):
        _check_named("optimizer", optimizer, Optimizer)
        optimizer = SeveralOptimizers(optimizer)
    models: Mapping[str, nn.Module] = {}
    _check_no_tensors(model)
    if isinstance(model, Mapping):
        _check_named("model", model, nn.Module)
        models, model = model, nn.ModuleDict(dict(model))
    if isinstance(model, nn.Module) and isinstance(optimizer, Optimizer):
        _check_owners(model, optimizer)
        _check_trained(models, optimizer)
    return model, optimizer


def check_names(optimizer: Optimizer, options: RunOptions) -> None:
    """Raise ValueError if an option names an optimizer that the run does not have."""
    names = optimizers_of(optimizer)
    for option in PER_OPTIMIZER:
        given = getattr(options, option)
        unknown = (
            [name for name in given if name not in names] if isinstance(given, Mapping) else []
        )
        if unknown:
            raise ValueError(
                f"`{option}` must name optimizers of the run, which are {_listed(names)}, but "
                f"names {unknown[0]!r}: pass a name of these, or one value for all."
            )


def check_one_model(model: Any) -> None:
    """Raise TypeError for several models, of which one loss cannot train each."""
    _check_no_tensors(model)
    if isinstance(model, Mapping):
        raise TypeError(
            f"a Trainer must have one model, but is given {_listed(model)}: train several with "
            f"`unisono.Run`, whose steps have `step.update(name)`."
        )


def _check_no_tensors(model: Any) -> None:
    """Raise TypeError for parameters without a module, such as an ensemble for vmap."""
    if isinstance(model, Mapping) and any(isinstance(v, torch.Tensor) for v in model.values()):
        raise TypeError(
            "`model` must be a torch.nn.Module, but is a dict of tensors: register them, as in "
            "`model = nn.ParameterList(tensors.values())`, make the optimizer from "
            "`model.parameters()`, and have the loss call `torch.func.functional_call`, or "
            "`torch.vmap` of it, with `dict(zip(tensors, model))`."
        )


def check_optimizer_names(names: Collection[str], chosen: tuple[str, ...]) -> None:
    """Raise ValueError unless the names are those of a run's optimizers, without repetition."""
    wrong = [name for name in chosen if name not in names]
    if wrong or not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"`step.update` must name optimizers of the run, which are {_listed(names)}, each "
            f"once, but got {_listed(chosen) or 'nothing'}: pass "
            f"`step.update({next(iter(names))!r})`, for example."
        )


def _check_named(what: str, given: Mapping[Any, Any], kind: type) -> None:
    if not given:
        raise ValueError(f"`{what}` must have at least one entry where it is a dict, but is empty.")
    for name, value in given.items():
        if not isinstance(value, kind):
            raise TypeError(
                f"`{what}` must have a torch `{kind.__name__}` under each name, but has a "
                f"{type(value).__name__} under {name!r}."
            )
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise ValueError(
                f"`{what}` must have names that a module's children may have, but has "
                f"{name!r}: choose a word such as `generator`."
            )


def _check_owners(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError if two optimizers update one parameter."""
    names = {id(p): name for name, p in named_parameters(model, optimizer).items()}
    owners: dict[int, str] = {}
    for owner, single in optimizers_of(optimizer).items():
        for parameter in {id(p): p for g in single.param_groups for p in g["params"]}.values():
            other = owners.setdefault(id(parameter), owner)
            if other != owner:
                raise ValueError(
                    f"a parameter must be updated by one optimizer, but "
                    f"`{names[id(parameter)]}` is by {other!r} and {owner!r}: give it to one of "
                    f"them, or make one optimizer over both."
                )


def _check_trained(models: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
    """Raise ValueError for a model that no optimizer updates and that is not frozen."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, model in models.items():
        parameters = list(model.parameters())
        is_trained = any(parameter.requires_grad for parameter in parameters)
        if is_trained and not any(id(parameter) in updated for parameter in parameters):
            raise ValueError(
                f"each model must be updated by an optimizer or be frozen, but none updates "
                f"{name!r}: make an optimizer over its parameters, or freeze it with "
                f"`{name}.requires_grad_(False)`."
            )


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))

"""A run of several models, or several optimizers: what it takes, and as what its parts see it.

Models become the children of one, under their names; so parameters, buffers and checkpoints are
those of one model. Optimizers become one that has all their state (``state/several_optimizers``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.state.contents import named_parameters
from unisono.state.optimizers import needs_closure
from unisono.state.several_optimizers import SeveralOptimizers, members_of
from unisono.train.run_options import PER_OPTIMIZER, RunOptions

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer]


def joined(model: Models, optimizer: Optimizers) -> tuple[nn.Module, Optimizer]:
    """Make one model of several, and one optimizer.

    Raises:
        TypeError: one is no model, or no optimizer, or has no name.
        ValueError: a name cannot be one, a parameter has two optimizers, or a model that is to be
            trained has none.
    """
    if isinstance(optimizer, Mapping):
        _check_named("optimizer", optimizer, Optimizer)
        optimizer = SeveralOptimizers(optimizer)
    models: Mapping[str, nn.Module] = {}
    if isinstance(model, Mapping):
        _check_named("model", model, nn.Module)
        models, model = model, nn.ModuleDict(dict(model))
    if isinstance(model, nn.Module) and isinstance(optimizer, Optimizer):
        _check_owners(model, optimizer)
        _check_trained(models, optimizer)
    return model, optimizer


def check_together(optimizer: Optimizer, options: RunOptions) -> None:
    """Refuse what does not go with several optimizers.

    Raises:
        ValueError: an option is for an optimizer that there is not, or for one optimizer alone.
    """
    names = members_of(optimizer)
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
    if len(names) > 1 and (options.closure or needs_closure(optimizer)):
        raise ValueError(
            f"a run with several optimizers ({_listed(names)}) must do without an optimizer that "
            f"takes a closure, but has it: leave it out, or make a run with one optimizer."
        )


def check_one_loss(model: Any, optimizer: Any, *, is_scaled: bool) -> None:
    """Refuse what one loss for all cannot train.

    Raises:
        TypeError: there are several models.
        ValueError: the loss is scaled for several optimizers.
    """
    if isinstance(optimizer, Mapping) and is_scaled:
        raise ValueError(
            f"losses are scaled for one optimizer at a time, but one loss is for several "
            f"({_listed(optimizer)}): leave out `grad_scaler` and take another `precision`, or "
            f"use `unisono.Run`, whose steps have `step.update(name)`."
        )
    if isinstance(model, Mapping):
        raise TypeError(
            f"a Trainer must have one model, but is given {_listed(model)}: train several with "
            f"`unisono.Run`, whose steps have `step.update(name)`."
        )


def members_named(optimizer: Optimizer, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """See that names are those of optimizers, each once.

    Raises:
        ValueError: one is not.
    """
    names = members_of(optimizer)
    if "" in names:
        raise ValueError(
            "`step.update` is for runs with several optimizers, but this one has one: leave it "
            "out, and write `with step:` alone."
        )
    wrong = [name for name in chosen if name not in names]
    if wrong or not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"`step.update` must name optimizers of the run, which are {_listed(names)}, each "
            f"once, but is given {_listed(chosen) or 'nothing'}: pass "
            f"`step.update({next(iter(names))!r})`, say."
        )
    return chosen


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
                f"`{what}` must have names that can be those of a module's children, but has "
                f"{name!r}: choose a word such as `generator`."
            )


def _check_owners(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a parameter that two optimizers update."""
    names = {id(p): name for name, p in named_parameters(model, optimizer).items()}
    owners: dict[int, str] = {}
    for owner, member in members_of(optimizer).items():
        for parameter in {id(p): p for g in member.param_groups for p in g["params"]}.values():
            other = owners.setdefault(id(parameter), owner)
            if other != owner:
                raise ValueError(
                    f"a parameter must be updated by one optimizer, but "
                    f"`{names[id(parameter)]}` is by {other!r} and {owner!r}: give it to one of "
                    f"them, or make one optimizer over both."
                )


def _check_trained(models: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
    """Refuse a model that nobody updates and that is not frozen."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, model in models.items():
        parameters = list(model.parameters())
        is_trained = any(parameter.requires_grad for parameter in parameters)
        if is_trained and not any(id(parameter) in updated for parameter in parameters):
            raise ValueError(
                f"each model must be updated by an optimizer or be frozen, but nobody updates "
                f"{name!r}: make an optimizer over its parameters, or freeze it with "
                f"`{name}.requires_grad_(False)`."
            )


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))

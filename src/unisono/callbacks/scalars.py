"""Learning rates, and numbers of steps and validations by the names that loggers show."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unisono.callbacks.callback import DoneStep, Fit

if TYPE_CHECKING:
    from torch.optim import Optimizer


def rates_of(optimizer: Optimizer) -> list[float]:
    """List the learning rate of each group of parameters, of those that have one."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def named_rates(optimizer: Optimizer, separator: str) -> dict[str, float]:
    """Name the learning rates; where there are several, by `separator` and the group's position."""
    rates = rates_of(optimizer)
    if len(rates) == 1:
        return {"learning_rate": rates[0]}
    return {f"learning_rate{separator}{at}": rate for at, rate in enumerate(rates)}


def of_step(fit: Fit, step: DoneStep) -> dict[str, float]:
    """Name a step's numbers: ``train/loss``, ``learning_rate``, ``gradient_norm``."""
    values = {f"train/{name}": mean for name, mean in step.means.items()}
    values |= named_rates(fit.optimizer, "/")
    if step.gradient_norm is not None:
        values["gradient_norm"] = step.gradient_norm
    return values


def of_validation(means: Mapping[str, Any]) -> dict[str, float]:
    """Name a validation's numbers: ``validation/loss``; lists are left out."""
    return {
        f"validation/{name}": float(value)
        for name, value in means.items()
        if isinstance(value, (int, float))
    }


def check_installed(module: str, product: str, extra: str) -> None:
    """Refuse a logger whose package is missing, before training.

    Raises:
        ModuleNotFoundError: it is.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"{product} must be installed to write curves for it, but is not: "
            f"`pip install 'unisono[{extra}]'`."
        )

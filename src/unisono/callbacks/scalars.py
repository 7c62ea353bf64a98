"""The numbers of a step and of a validation, by the names under which loggers show them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from unisono.callbacks.callback import DoneStep, Fit
from unisono.callbacks.rates import named_rates


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

"""Ends training when validations no longer improve; every worker decides the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.callbacks.callback import Callback, Fit
from unisono.whole import check_whole

BETTER = ("lower", "higher")


def rule_of(monitor: str, better: str, min_delta: float) -> list[Any]:
    """Check how a callback judges validations, and give it as plain JSON.

    Raises:
        ValueError: `min_delta` does not fit, or `better` is something else.
    """
    if better not in BETTER:
        raise ValueError(f"`better` must be one of {BETTER}, but is {better!r}.")
    if not min_delta >= 0.0:
        raise ValueError(f"`min_delta` must be at least 0, but is {min_delta}.")
    return [monitor, better, float(min_delta)]


def is_better(value: float, best: float | None, rule: Sequence[Any]) -> bool:
    """Tell whether `value` is better than `best`, as :func:`rule_of` says.

    NaN never is; anything is better than None, which stands for nothing so far.
    """
    _, better, min_delta = rule
    if best is None:
        return True
    if math.isnan(best):
        return not math.isnan(value)
    gain = best - value if better == "lower" else value - best
    return bool(gain > min_delta)


def monitored(means: Mapping[str, Any], name: str, option: str = "monitor") -> float:
    """Look up the mean that `option` names.

    Raises:
        ValueError: there is no such mean.
    """
    numbers = sorted(other for other, value in means.items() if not isinstance(value, list))
    if name not in numbers:
        raise ValueError(
            f"`{option}` must be one of the means that the loss function gives, or a metric that "
            f"is one number, {numbers}, but is {name!r}."
        )
    return float(means[name])


class EarlyStopping(Callback):
    """Ends training when validations have not improved for a while. Final.

    What was best is kept with the run: a resumed run decides as one that never stopped. A run that
    was stopped stays stopped for every `fit` with this callback, and continues without it.

    Args:
        patience: how many validations in a row may be no better than the best before them.
        monitor: the name of a validation's mean.
        better: ``"lower"`` (a loss) or ``"higher"`` (an accuracy).
        min_delta: by how much a validation must be better, at least.

    Raises:
        TypeError: `patience` is not a whole number.
        ValueError: a number does not fit, or `better` is something else.
    """

    needs_validation = True

    def __init__(
        self,
        patience: int = 3,
        *,
        monitor: str = "loss",
        better: str = "lower",
        min_delta: float = 0.0,
    ) -> None:
        self._patience = check_whole("patience", patience, at_least=1)
        self._monitor, self._rule = monitor, rule_of(monitor, better, min_delta)
        self._best: float | None = None
        self._waited = 0

    def forget(self) -> None:
        """Forget what an earlier run has found."""
        self._best, self._waited = None, 0

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Judge a validation, and stop if patience is at its end."""
        if fit.has_ended:
            return
        value = monitored(means, self._monitor)
        if is_better(value, self._best, self._rule):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            validations = f"{self._waited} validation{'s' * (self._waited > 1)}"
            fit.stop(
                f"stopping early: {self._monitor} was {self._best:.4f} at best, {validations} ago"
            )

    def state_dict(self) -> dict[str, Any]:
        """Give what was best, and by which rule."""
        return {"best": self._best, "waited": self._waited, "rule": self._rule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was best, unless another rule found it."""
        same = state["rule"] == self._rule
        self._best, self._waited = (state["best"], state["waited"]) if same else (None, 0)

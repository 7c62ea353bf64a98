"""End training once validations no longer improve, at the same step on every worker."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, final

from unisono.runtime.habits import habits_met
from unisono.runtime.notices import decimal
from unisono.runtime.whole import check_whole
from unisono.training.callbacks.best_validation import ValidationJudge, monitored
from unisono.training.callbacks.callback import Fit


@final
class EarlyStopping(ValidationJudge):
    """Ends training when validations have not improved for a while.

    The best result is saved with the run, so a resumed run decides like an uninterrupted one. A run
    that was stopped stays stopped for every `fit` with this callback, and continues without it.
    Args:
        patience: how many validations in a row may fail to improve on the best one.
        monitor: the name of a validation's mean.
        better: ``"lower"`` (a loss) or ``"higher"`` (an accuracy).
        min_delta: the least improvement that counts.

    Raises:
        TypeError: `patience` is not an integer.
        ValueError: a number is not valid, or `better` is something else.
    """

    waited: int
    _kept = MappingProxyType({"best": None, "waited": 0})

    @habits_met('EarlyStopping(patience=3, monitor="loss")')
    def __init__(
        self,
        patience: int = 3,
        *,
        monitor: str = "loss",
        better: str = "lower",
        min_delta: float = 0.0,
    ) -> None:
        given: object = patience
        if isinstance(given, str):
            raise TypeError(
                f"`patience` must be a whole number, but is {given!r}: write "
                f'`EarlyStopping(3, monitor={given!r})`, for an accuracy with `better="higher"`.'
            )
        self._patience = check_whole("patience", patience, at_least=1)
        super().__init__(monitor, better, min_delta)

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Judge a validation, and stop the run if patience is exhausted."""
        if fit.has_ended:
            return
        value = monitored(means, self.monitor)
        if self._is_better(value):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self._patience:
            validations = f"{self.waited} validation{'s' * (self.waited > 1)}"
            best, (_, better, least) = decimal(self.best or 0.0), self._rule
            seen = f"{self.monitor} was {best} at best, {validations} ago"
            if least:
                seen = f"{self.monitor} was {best}, and in {validations} not {least} {better}"
            fit.stop(f"stopping early: {seen}")

"""When does training no longer help? Decided from what validations found, by every worker alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from unisono.train.whole import check_whole

BETTER = ("lower", "higher")
KEY = "early stopping"


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End training when validations have not got better for a while; for ``fit(stop_early=…)``.

    Every worker has the same means, so every worker decides the same. What was best is kept with
    the run: a run that is stopped and taken up again decides as one that never stopped.

    Attributes:
        patience: how many validations in a row may be no better than the best before them.
        monitor: the name of a validation's mean.
        better: ``"lower"`` (a loss) or ``"higher"`` (an accuracy).
        min_delta: by how much a validation must be better, at least.

    Raises:
        TypeError: `patience` is not a whole number.
        ValueError: a number does not fit, or `better` is something else.
    """

    patience: int = 3
    monitor: str = "loss"
    better: str = "lower"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_whole("patience", self.patience, at_least=1)
        if self.better not in BETTER:
            raise ValueError(f"`better` must be one of {BETTER}, but is {self.better!r}.")
        if not self.min_delta >= 0.0:
            raise ValueError(f"`min_delta` must be at least 0, but is {self.min_delta}.")

    def judge(self, means: Mapping[str, Any], sofar: Mapping[str, Any] | None) -> dict[str, Any]:
        """Take notice of a validation.

        Args:
            means: what it found.
            sofar: what the last call returned; None at first, and of no account if it comes from
                another rule.

        Returns:
            Plain JSON: ``best``, the best mean so far; ``waited``, validations since then; the
            ``rule`` by which both were found.

        Raises:
            ValueError: there is no such mean.
        """
        numbers = sorted(name for name, value in means.items() if not isinstance(value, list))
        if self.monitor not in numbers:
            raise ValueError(
                f"`monitor` must be one of the means that the loss function gives, or a metric "
                f"that is one number, {numbers}, but is {self.monitor!r}."
            )
        value = means[self.monitor]
        rule = [self.monitor, self.better, self.min_delta]
        if sofar is None or sofar["rule"] != rule or self._is_better(value, sofar["best"]):
            return {"best": value, "waited": 0, "rule": rule}
        return {**sofar, "waited": sofar["waited"] + 1}

    def says_stop(self, sofar: Mapping[str, Any]) -> bool:
        """Tell whether patience is at its end."""
        return bool(sofar["waited"] >= self.patience)

    def _is_better(self, value: float, best: float) -> bool:
        if math.isnan(best):
            return not math.isnan(value)
        gain = best - value if self.better == "lower" else value - best
        return gain > self.min_delta


def decide(
    rule: EarlyStopping | None, means: Mapping[str, Any], last: MutableMapping[str, Any]
) -> str:
    """Judge a validation and note it in what is kept with the run.

    Returns:
        Why training ends here; empty if it goes on.
    """
    if rule is None:
        return ""
    last[KEY] = rule.judge(means, last.get(KEY))
    if not rule.says_stop(last[KEY]):
        return ""
    return (
        f"stopping early: {rule.monitor} was {last[KEY]['best']:.4f} at best, "
        f"{rule.patience} validation{'s' * (rule.patience > 1)} ago"
    )

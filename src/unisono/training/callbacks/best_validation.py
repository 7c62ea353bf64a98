"""What follows from the best validation: training ends, or weights are saved.

Every worker decides the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.engine.state.load import save_weights
from unisono.runtime.habits import habits_met
from unisono.runtime.plainfile import check_plain
from unisono.runtime.whole import check_whole
from unisono.training.callbacks.callback import Callback, Fit
from unisono.training.callbacks.journal import path_of, trouble_at

BETTER = ("lower", "higher")


def rule_of(monitor: str, better: str, min_delta: float) -> list[Any]:
    """Check how a callback judges validations, and give it as plain JSON."""
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


def monitored(means: Mapping[str, Any], name: str) -> float:
    """Look up the mean that `monitor` names."""
    numbers = sorted(n for n, value in means.items() if not isinstance(value, (list, dict)))
    if name not in numbers:
        meant = [each for each in numbers if name.endswith(each)] or numbers
        raise ValueError(
            f"`monitor` must be one of the means that the loss function gives, or a metric that is "
            f'one number, {numbers}, but is {name!r}: pass `monitor="{meant[0]}"`.'
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
        self.monitor, self._rule = monitor, rule_of(monitor, better, min_delta)
        self._best: float | None = None
        self._waited = 0

    def forget(self) -> None:
        """Forget what an earlier run has found."""
        self._best, self._waited = None, 0

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Judge a validation, and stop if patience is at its end."""
        if fit.has_ended:
            return
        value = monitored(means, self.monitor)
        if is_better(value, self._best, self._rule):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            validations = f"{self._waited} validation{'s' * (self._waited > 1)}"
            best, (_, better, least) = f"{self._best:.4f}", self._rule
            seen = f"{self.monitor} was {best} at best, {validations} ago"
            if least:
                seen = f"{self.monitor} was {best}, and in {validations} not {least} {better}"
            fit.stop(f"stopping early: {seen}")

    def state_dict(self) -> dict[str, Any]:
        """Give what was best, and by which rule."""
        return {"best": self._best, "waited": self._waited, "rule": self._rule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was best, unless another rule found it."""
        same = state["rule"] == self._rule
        self._best, self._waited = (state["best"], state["waited"]) if same else (None, 0)


NAME = "best.safetensors"


class BestCheckpoint(Callback):
    """Saves the weights that validated best; ``unisono.load_weights`` reads the file. Final.

    At any moment the file is the old one or the whole new one. It is written before training
    continues; if the worker that writes is lost, the next one does it. A full disk ends no run: it
    is reported, and the next better weights are tried.

    What was best is kept with the run, so a run that is resumed, or goes back, judges as one that
    never stopped. The validation at the very end of ``fit``, where none was due, counts for the
    file; a run that continues from there forgets it.

    Args:
        path: the file, one for each of several; None: ``best.safetensors`` in the run directory.
            Its folder is made.
        monitor: the name of a validation's mean.
        better: ``"lower"`` (a loss) or ``"higher"`` (an accuracy).
        min_delta: by how much a validation must be better, at least.

    Attributes:
        best: the best of the validations that were due; None before the first.
        step: the steps that were done then; None before the first.

    Raises:
        ValueError: a number does not fit, or `better` is something else.
    """

    needs_validation = True

    @habits_met('BestCheckpoint(monitor="loss")')
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        monitor: str = "loss",
        better: str = "lower",
        min_delta: float = 0.0,
    ) -> None:
        self._given = None if path is None else Path(path)
        self._path = Path()  # of the call of `fit` under way
        self.monitor, self._rule = monitor, rule_of(monitor, better, min_delta)
        self.best: float | None = None
        self.step: int | None = None

    def writes_to(self, directory: Path | None) -> Path | None:
        """See :class:`Callback`."""
        return self._given or (directory and directory / NAME)

    def forget(self) -> None:
        """Forget what was best in an earlier run."""
        self.best, self.step = None, None

    def on_begin(self, fit: Fit) -> None:
        """See that there is a place for the file."""
        example = 'BestCheckpoint("best.safetensors")'
        self._path = path_of(self, fit, "the best weights go", example)
        if not fit.has_joined:
            check_plain(self._path, is_replaced=True)

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Keep the weights if they are the best so far."""
        if str(self._given) in means:
            raise ValueError(
                f"`path` must name a file, but {str(self._given)!r} is a mean: write "
                f'`BestCheckpoint(monitor="{self._given}", better="higher")`, or "lower".'
            )
        value = monitored(means, self.monitor)
        if math.isnan(value) or not is_better(value, self.best, self._rule):
            return
        trouble = fit.once(lambda: self._save(fit), "saving the best weights")
        if trouble:
            fit.say(trouble)
        if not fit.has_ended:
            self.best, self.step = value, fit.step

    def state_dict(self) -> dict[str, Any]:
        """Give what was best, and by which rule."""
        return {"best": self.best, "step": self.step, "rule": self._rule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was best, unless another rule found it."""
        same = state["rule"] == self._rule
        self.best, self.step = (state["best"], state["step"]) if same else (None, None)

    def _save(self, fit: Fit) -> str:
        path = self._path
        try:
            if trouble := trouble_at(fit, path):
                raise OSError(trouble)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Parameters change only after all have met, so nobody changes them meanwhile.
            save_weights(fit.model, path)
        except OSError as error:
            why = str(error).removesuffix(".")
            return (
                f"the best weights so far, of step {fit.step}, are not in {path}: {why}; "
                f"training goes on."
            )
        return ""

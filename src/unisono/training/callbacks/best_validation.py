"""The best validation, the same on every worker, and a callback that saves its weights."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

from typing_extensions import override

from unisono.engine.state.load import save_weights
from unisono.runtime.habits import habits_met
from unisono.runtime.plainfile import check_plain, weights_file
from unisono.training.callbacks.callback import Callback, Fit
from unisono.training.callbacks.journal import path_of, trouble_at


def monitored(means: Mapping[str, Any], name: str) -> float:
    """Return the mean that `monitor` names."""
    numbers = sorted(n for n, value in means.items() if not isinstance(value, (list, dict)))
    if name not in numbers:
        meant = [each for each in numbers if name.endswith(each)] or numbers
        raise ValueError(
            f"`monitor` must be one of the means that the loss function returns, or a metric "
            f'that is one number, {numbers}, but is {name!r}: pass `monitor="{meant[0]}"`.'
        )
    return float(means[name])


class ValidationJudge(Callback):
    """Compares validations by one of their means; the best one is saved with the run."""

    needs_validation = True
    best: float | None
    _kept: ClassVar[Mapping[str, Any]]  # the initial values of what is saved, by name

    def __init__(self, monitor: str, better: str, min_delta: float) -> None:
        if better not in ("lower", "higher"):
            raise ValueError(f"`better` must be one of ('lower', 'higher'), but is {better!r}.")
        if not min_delta >= 0.0:
            raise ValueError(f"`min_delta` must be at least 0, but is {min_delta}.")
        self.monitor = monitor
        self._rule: list[Any] = [monitor, better, float(min_delta)]
        self.forget()

    def forget(self) -> None:
        """Forget the validations of an earlier run."""
        vars(self).update(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the best result, and the rule that chose it."""
        return {name: getattr(self, name) for name in self._kept} | {"rule": self._rule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the best result, unless another rule chose it."""
        self.forget()
        if state["rule"] == self._rule:
            vars(self).update({name: state[name] for name in self._kept})

    def _is_better(self, value: float) -> bool:
        """Return whether a value beats the best one: any does at first, NaN never does later."""
        if self.best is None or math.isnan(self.best):
            return self.best is None or not math.isnan(value)
        _, better, min_delta = self._rule
        return bool((self.best - value) * (1 if better == "lower" else -1) > min_delta)


NAME = "best.safetensors"


@final
class BestCheckpoint(ValidationJudge):
    """Saves the weights that validated best; ``unisono.load_weights`` reads the file.

    At any moment the file is either the old one or the whole new one. It is written before training
    continues; if the worker that writes it is lost, the next one does. A full disk does not end the
    run: the error is reported, and the next better weights are tried.

    The best result is saved with the run, so a run that resumes, or goes back, judges like an
    uninterrupted one. The last validation of ``fit``, if none was due, counts for the file only: a
    run that continues from there forgets it.

    Args:
        path: the file, a separate one for each such callback; None: ``best.safetensors`` in the run
            directory. Its folder is created.
        monitor: the name of a validation's mean.
        better: ``"lower"`` (a loss) or ``"higher"`` (an accuracy).
        min_delta: the least improvement that counts.

    Attributes:
        best: the best of the validations that were due; None before the first.
        step: the number of steps done at that time; None before the first.

    Raises:
        ValueError: a number is not valid, or `better` is something else.
    """

    step: int | None
    _kept = MappingProxyType({"best": None, "step": None})

    @habits_met('BestCheckpoint(monitor="loss")')
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        monitor: str = "loss",
        better: str = "lower",
        min_delta: float = 0.0,
    ) -> None:
        self._given = None if path is None else weights_file(path)
        self._path = Path()  # of the call of `fit` under way
        super().__init__(monitor, better, min_delta)

    @override
    def writes_to(self, directory: Path | None) -> Path | None:
        return self._given or (directory and directory / NAME)

    def on_begin(self, fit: Fit) -> None:
        """Check that the file can be written."""
        example = 'BestCheckpoint("best.safetensors")'
        self._path = path_of(self, fit, "the best weights go", example)
        if not fit.has_joined:
            check_plain(self._path, is_replaced=True)

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Save the weights if they are the best so far."""
        if str(self._given) in means:
            raise ValueError(
                f"`path` must name a file, but {str(self._given)!r} is a mean: write "
                f'`BestCheckpoint(monitor="{self._given}", better="higher")`, or "lower".'
            )
        value = monitored(means, self.monitor)
        if math.isnan(value) or not self._is_better(value):
            return
        trouble = fit.once(lambda: self._save(fit), "saving the best weights")
        if trouble:
            fit.say(trouble)
        if not fit.has_ended:
            self.best, self.step = value, fit.step

    def _save(self, fit: Fit) -> str:
        path = self._path
        try:
            if trouble := trouble_at(fit, path):
                raise OSError(trouble)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Parameters change only after all workers have synchronized, so not during the save.
            save_weights(fit.validated_model, path)
        except OSError as error:
            why = str(error).removesuffix(".")
            return (
                f"the best weights so far, of step {fit.step}, are not in {path}: {why}; "
                f"training continues."
            )
        return ""

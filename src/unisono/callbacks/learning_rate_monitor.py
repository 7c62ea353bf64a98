"""Reports changes of learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unisono.callbacks.callback import Callback, Fit

if TYPE_CHECKING:  # the process of the loggers has no need of torch
    from torch.optim import Optimizer


class LearningRateMonitor(Callback):
    """Prints a line at the end of an epoch if learning rates have changed. Final.

    Changes are kept with the run, so each is reported once.

    Attributes:
        changes: (steps done, rates from there on), those of the beginning first; one rate for each
            group of parameters.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[int, list[float]]] = []

    def forget(self) -> None:
        """Forget the rates of an earlier run."""
        self.changes = []

    def on_begin(self, fit: Fit) -> None:
        """Note the rates that the run begins with."""
        if not self.changes:
            self.changes.append((fit.step, rates_of(fit.optimizer)))

    def on_epoch_end(self, fit: Fit) -> None:
        """Look at the rates."""
        before, rates = self.changes[-1][1], rates_of(fit.optimizer)
        if rates != before:
            self.changes.append((fit.step, rates))
            fit.say(f"epoch {fit.epoch}: learning rate {_told(before)} → {_told(rates)}")

    def state_dict(self) -> dict[str, Any]:
        """Return the changes."""
        return {"changes": [list(change) for change in self.changes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the changes."""
        self.changes = [(int(step), list(rates)) for step, rates in state["changes"]]


def rates_of(optimizer: Optimizer) -> list[float]:
    """List the learning rate of each group of parameters, of those that have one."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _told(rates: list[float]) -> str:
    return ", ".join(f"{rate:.4g}" for rate in rates)

"""When does a schedule of learning rates step? After each step, epoch or validation.

Steps and epochs are those of the run, whatever the number of workers, so the rates are too. The
schedule is kept with the run: it goes back with it, and goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.callbacks.best_validation import monitored
from unisono.state.several_optimizers import members_of

INTERVALS = ("step", "epoch")
KEY = "schedule"
LOSS = "loss"


class Schedule:
    """A run's schedule, or none. Final.

    Args:
        scheduler: torch's; None: rates stay.
        interval: ``"step"`` or ``"epoch"``.
        optimizer: the run's.
        monitor: the name of the validations' mean that ReduceLROnPlateau looks at.

    Raises:
        TypeError: it is no schedule.
        ValueError: it belongs to another optimizer, `interval` is something else, or `monitor`
            does not fit it.
    """

    def __init__(
        self, scheduler: Any, interval: str, optimizer: Optimizer, monitor: str = LOSS
    ) -> None:
        if interval not in INTERVALS:
            raise ValueError(f"`schedule_every` must be one of {INTERVALS}, but is {interval!r}.")
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"`schedule` must be one of torch.optim.lr_scheduler, but is of type "
                f"{type(scheduler).__name__}: pass `CosineAnnealingLR(optimizer, T_max=30)`, say."
            )
        members = members_of(optimizer).values()
        if scheduler is not None and not any(scheduler.optimizer is each for each in members):
            raise ValueError(
                "`schedule` must belong to the optimizer that trains, but belongs to another one: "
                "make it with the optimizer that the trainer gets."
            )
        if isinstance(scheduler, ReduceLROnPlateau) and interval != "epoch":
            raise ValueError(
                "ReduceLROnPlateau steps after each validation, so `schedule_every` must be left "
                f"out, but is {interval!r}: say when to validate with `validate_every`."
            )
        self._scheduler, self._interval, self._monitor = scheduler, interval, monitor
        if monitor != LOSS and not self.needs_validation:
            raise ValueError(
                f"`schedule_monitor` is what ReduceLROnPlateau looks at, but is {monitor!r} "
                f"without one: leave it out."
            )
        if monitor == LOSS and getattr(scheduler, "mode", "min") == "max":
            raise ValueError(
                'ReduceLROnPlateau with `mode="max"` must look at something that is to grow, but '
                'looks at the loss: pass `schedule_monitor="accuracy"`, say.'
            )

    @property
    def name(self) -> str | None:
        """What it is, in words, for the identity of a run."""
        if self._scheduler is None:
            return None
        looks_at = "" if self._monitor == LOSS else f", of {self._monitor}"
        return f"{type(self._scheduler).__name__} every {self._interval}{looks_at}"

    @property
    def needs_validation(self) -> bool:
        """Whether it looks at what a validation found."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    @property
    def counts_epochs(self) -> bool:
        """Whether it steps when an epoch ends."""
        has_one = self._scheduler is not None and not self.needs_validation
        return has_one and self._interval == "epoch"

    def after_step(self) -> None:
        """Take notice of a step that is done."""
        if self._scheduler is not None and self._interval == "step":
            self._scheduler.step()

    def after_epoch(self) -> None:
        """Take notice of an epoch that is done."""
        if self._scheduler is not None and self.counts_epochs:
            self._scheduler.step()

    def after_validation(self, means: Mapping[str, Any]) -> None:
        """Take notice of what a validation found."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(monitored(means, self._monitor, "schedule_monitor"))

"""When does a schedule of learning rates step? After each step, epoch or validation.

Steps and epochs are those of the run, whatever the number of workers, so the rates are too. The
schedule is kept with the run: it goes back with it, and goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

INTERVALS = ("step", "epoch")
KEY = "schedule"


class Schedule:
    """A run's schedule, or none. Final.

    Args:
        scheduler: torch's; None: rates stay.
        interval: ``"step"`` or ``"epoch"``.
        optimizer: the run's.

    Raises:
        TypeError: it is no schedule.
        ValueError: it belongs to another optimizer, or `interval` is something else.
    """

    def __init__(self, scheduler: Any, interval: str, optimizer: Optimizer) -> None:
        if interval not in INTERVALS:
            raise ValueError(f"`schedule_every` must be one of {INTERVALS}, but is {interval!r}.")
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"`schedule` must be one of torch.optim.lr_scheduler, but is of type "
                f"{type(scheduler).__name__}: pass `CosineAnnealingLR(optimizer, T_max=30)`, say."
            )
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ValueError(
                "`schedule` must belong to the optimizer that trains, but belongs to another one: "
                "make it with the optimizer that the trainer gets."
            )
        if isinstance(scheduler, ReduceLROnPlateau) and interval != "epoch":
            raise ValueError(
                "ReduceLROnPlateau steps after each validation, so `schedule_every` must be left "
                f"out, but is {interval!r}: say when to validate with `validate_every`."
            )
        self._scheduler, self._interval = scheduler, interval

    @property
    def name(self) -> str | None:
        """What it is, in words, for the identity of a run."""
        if self._scheduler is None:
            return None
        return f"{type(self._scheduler).__name__} every {self._interval}"

    @property
    def needs_validation(self) -> bool:
        """Whether it looks at the validation's loss."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def after_step(self) -> None:
        """Take notice of a step that is done."""
        if self._scheduler is not None and self._interval == "step":
            self._scheduler.step()

    def after_epoch(self) -> None:
        """Take notice of an epoch that is done."""
        if self._scheduler is None or self._interval != "epoch" or self.needs_validation:
            return
        self._scheduler.step()

    def after_validation(self, means: Mapping[str, float]) -> None:
        """Take notice of what a validation found."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(means["loss"])

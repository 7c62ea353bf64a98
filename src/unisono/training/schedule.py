"""When does a schedule of learning rates step, and when is a run validated?

Steps and epochs are those of the run, whatever the number of workers, and so are the rates. The
schedule and the newest validation are saved with the run, so a worker that joins or resumes it
validates where the others do.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from unisono.engine.state.optimizers import optimizers_of
from unisono.engine.state.recorded_options import steps_done
from unisono.training.callbacks.best_validation import monitored
from unisono.training.callbacks.callback import Callbacks, Fit
from unisono.training.epoch_history import note_validation
from unisono.training.loop_plan import LoopPlan
from unisono.training.options import LOSS, Every, Schedule
from unisono.training.run import Run, context_of

KEY = "schedule"


@final
class ScheduleUnderWay:
    """A run's schedule, or none; refuses one of another optimizer."""

    def __init__(self, schedule: Schedule | None, optimizer: Optimizer) -> None:
        self._scheduler: LRScheduler | None = None if schedule is None else schedule.scheduler
        self._interval = "epoch" if schedule is None else schedule.every
        self.monitor = LOSS if schedule is None else schedule.monitor
        self.needs_validation = isinstance(self._scheduler, ReduceLROnPlateau)
        is_given = self._scheduler is not None
        self.counts_epochs = is_given and not self.needs_validation and self._interval == "epoch"
        looks_at = "" if self.monitor == LOSS else f", of {self.monitor}"
        kind = type(self._scheduler).__name__
        self.name = f"{kind} every {self._interval}{looks_at}" if is_given else None
        optimizers = optimizers_of(optimizer).values()
        if self._scheduler and all(self._scheduler.optimizer is not each for each in optimizers):
            raise ValueError(
                "`schedule` must belong to the optimizer that trains, but belongs to another one: "
                "make it with the optimizer that the trainer gets."
            )

    def check(self, num_steps: int, num_epochs: int, *, is_known: bool) -> str:
        """Raise ValueError if the schedule is too short; return a warning if its unit is odd.

        If the numbers are estimates, not `is_known`, no schedule is too short.
        """
        scheduler = self._scheduler
        if scheduler is None or self.needs_validation:
            return ""
        num_done = steps_done(scheduler)
        calls = num_done + (num_epochs if self.counts_epochs else num_steps)
        if is_known and isinstance(scheduler, OneCycleLR) and calls > scheduler.total_steps:
            raise ValueError(
                f"OneCycleLR must last as long as the run, but ends after {scheduler.total_steps} "
                f"of {calls} {self._interval}s: make it with `total_steps` for all of them."
            )
        if not self.counts_epochs or num_done or not 0 < num_epochs < num_steps:
            return ""
        why = _counts_steps(scheduler, num_steps, num_epochs)
        return why and (
            f"{type(scheduler).__name__} is stepped once an epoch, but {why}: if it counts steps, "
            f'pass `schedule=Schedule(scheduler, every="step")`'
        )

    def after_step(self) -> None:
        """Step the schedule after a step, if it counts steps."""
        if self._scheduler is not None and self._interval == "step":
            self._scheduler.step()

    def after_epoch(self) -> None:
        """Step the schedule after an epoch, if it counts epochs."""
        if self._scheduler is not None and self.counts_epochs:
            self._scheduler.step()

    def after_validation(self, means: Mapping[str, Any]) -> None:
        """Step a ReduceLROnPlateau with the means of a validation."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(monitored(means, self.monitor))


def _counts_steps(scheduler: Any, num_steps: int, num_epochs: int) -> str:
    """Return why a schedule seems to count steps, not epochs; empty if it does not."""
    if not any(group["lr"] for group in scheduler.optimizer.param_groups):
        return "the learning rate is 0 for the whole first epoch"
    lasts = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    if isinstance(scheduler, LambdaLR):
        with contextlib.suppress(Exception):  # the program's functions may raise
            for of in scheduler.lr_lambdas:
                if of(num_steps) == 0 and of(num_steps - 1) and of(num_epochs):
                    lasts.append(num_steps)
    if num_steps in lasts:
        return f"it lasts {num_steps} steps, as the run does"
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps > num_epochs:
        return f"it lasts {scheduler.total_steps} steps, of which it would do {num_epochs}"
    if isinstance(scheduler, CyclicLR):
        return "it is made to step after each batch"
    return ""


Means = dict[str, Any]


def sets_by_name(validate: Any) -> Mapping[str, Any]:
    """Return the datasets to validate on, by name; a single one has the empty name."""
    if validate is None:
        return {}
    if not isinstance(validate, Mapping) or 0 in validate:
        return {"": validate}
    if not validate or not all(isinstance(n, str) and n and "/" not in n for n in validate):
        raise ValueError(
            f"the keys of a dict of datasets in `validate` must be strings without `/`, but are "
            f'{list(validate)}: pass `{{"seen": a, "new": b}}`, for example.'
        )
    return validate


@final
class Validation:
    """The validations of one call of ``fit``; `compute` is None without a dataset."""

    def __init__(
        self,
        run: Run,
        compute: Callable[[], Means] | None,
        every: int | str,
        names: Iterable[str] = (),
        computed: Iterable[str] = (),
    ) -> None:
        self._monitors: list[str] = []
        self._computed = frozenset(computed)  # the names of metrics, as far as they are known
        self._run, self._position, self._compute = run, run.position, compute
        self._names, self.has_data = [name for name in names if name], compute is not None
        self._every = Every.read(every, "validate_every")
        if self._every.seconds is not None:
            raise ValueError(
                f"`validate_every` must be in steps or epochs, as clocks differ between workers, "
                f"but is {every!r}: pass `500`, for example."
            )

    def must_be(self, for_what: str, monitor: str) -> None:
        """Raise ValueError if there is no validation, or none on the dataset in `monitor`."""
        if not self.has_data:
            raise ValueError(
                f"`validate` must be given for {for_what}, which watches validations, but is "
                f"None: pass a dataset."
            )
        names = self._names
        if monitor and names and not any(monitor.startswith(f"{name}/") for name in names):
            raise ValueError(
                f"`monitor` must name the dataset that {for_what} watches if `validate` has "
                f'{names}, but is {monitor!r}: pass `monitor="{names[0]}/{monitor}"`.'
            )
        self._monitors += [monitor] if monitor else []

    def check_monitors(self, means: Mapping[str, Any]) -> None:
        """Raise if no validation returns a monitored name; called after the first step. Collective.

        A name that the step's means lack may exist in validations alone: one is run to find out.
        """
        assert self._compute is not None or not self._monitors
        known = {*means, *self._computed}
        known |= {f"{name}/{each}" for name in self._names for each in known}
        if unknown := [name for name in self._monitors if name not in known]:
            found = self.preview()
            for name in unknown:
                monitored(found, name)

    def preview(self) -> Means:
        """Validate without recording the result. Collective."""
        assert self._compute is not None, "only where there is something to validate on"
        return self._compute()

    def begin(self) -> None:
        """Begin a loop, after the run has restored its state."""
        if self._run.last.get("validated_in") != context_of(self._run).num_loops:
            self._run.last.update(validation=None, validated_at=None)

    @property
    def newest(self) -> Means | None:
        """The means of a validation after the last step; None if there was none."""
        last: dict[str, Any] = self._run.last
        is_new = last["validated_at"] == self._position.step
        return last["validation"] if is_new else None

    def is_due(self) -> bool:
        """Return whether a validation is due after the last step."""
        position = self._position
        ended = position.epoch if position.batch == 0 else 0
        return self._every.is_due(steps=position.step, epoch_ended=ended, seconds=0.0)

    def compute(self) -> Means:
        """Validate and record the result. Collective."""
        means = self.preview()
        number = context_of(self._run).num_loops
        at = {"validated_at": self._position.step, "validated_in": number}
        self._run.last.update(validation=means, **at)
        return means


_LEFT = "conclusions"
"""In ``run.last``: steps done when a call failed, the last :class:`Drawn`, callbacks left out."""


@final
class Drawn(enum.IntEnum):
    """The last action that followed a step."""

    NONE = 0
    STEP = 1  # in the schedule, if it counts steps
    VALIDATION = 2
    EPOCH = 3  # in the schedule, if it counts epochs


# The callbacks' method that may fail after each.
_MOMENTS = {
    Drawn.NONE: "on_step_end",
    Drawn.VALIDATION: "on_validation",
    Drawn.EPOCH: "on_epoch_end",
}


@final
class Conclusions:
    """The actions that follow a step, besides those of callbacks; `drawn` is the last one done.

    If one fails, a checkpoint records the step and what is left: the run resumes with the rest.
    The callbacks after a failed one miss that moment, and a message says so.
    """

    def __init__(
        self,
        run: Run,
        schedule: ScheduleUnderWay,
        validation: Validation,
        callbacks: Callbacks,
        fit: Fit,
        validate: Callable[[str], None],
    ) -> None:
        self._run, self._position = run, run.position
        self._schedule, self._validation = schedule, validation
        self._callbacks, self._fit, self._validate = callbacks, fit, validate
        self.drawn: Drawn | None = None

    def check(self, plan: LoopPlan, end_step: int) -> str:
        """Check the schedule before the steps of a loop; see :meth:`ScheduleUnderWay.check`."""
        position, num_epochs = self._position, 0
        if not plan.samples.is_endless:
            num_batches = plan.totals.num_batches(plan.samples, position)
            num_epochs = num_batches // plan.samples.steps_per_epoch - position.epoch
        is_known = plan.samples.cuts is None  # else epochs may differ in length
        return self._schedule.check(end_step - position.step, num_epochs, is_known=is_known)

    def begin(self) -> None:
        """Begin a loop, after the run has restored its state."""
        if self.left is None:
            self._validation.begin()

    def draw(self, drawn: Drawn = Drawn.NONE) -> bool:
        """Do what follows the last step, after `drawn`; return whether it ended an epoch."""
        position = self._position
        self.drawn, has_ended = drawn, position.batch == 0
        if drawn < Drawn.STEP:
            self._schedule.after_step()
            self.drawn = Drawn.STEP
        if drawn < Drawn.EPOCH and self._validation.is_due():
            if drawn < Drawn.VALIDATION:
                self._validate(f"epoch {position.epoch}" if has_ended else f"step {position.step}")
            if (found := self._validation.newest) is not None:
                note_validation(self._run.last, found, position)
                self._schedule.after_validation(found)
        if drawn < Drawn.EPOCH and has_ended:
            self._schedule.after_epoch()
            self.drawn = Drawn.EPOCH
            self._callbacks.call("on_epoch_end", self._fit)
        self.drawn = None
        return has_ended

    def note_left(self) -> None:
        """Record what was done when the call fails."""
        if self.drawn is not None:
            behind = self._callbacks.behind(_MOMENTS[self.drawn]) if self.drawn in _MOMENTS else []
            self._run.last[_LEFT] = [self._position.step, self.drawn, behind]

    @property
    def left(self) -> Drawn | None:
        """The last action of an earlier call that failed at this step; None if none did."""
        step, drawn, _ = self._run.last.get(_LEFT, (-1, 0, []))
        is_here = step == self._position.step and not self._run.is_ahead
        return Drawn(drawn) if is_here else None

    def draw_left(self) -> None:
        """Do what an earlier call has left."""
        if (drawn := self.left) is not None:
            step, _, behind = self._run.last[_LEFT]
            if behind:
                self._fit.say(
                    f"{', '.join(behind)} did not see `{_MOMENTS[drawn]}` of step {step - 1}, as "
                    f"another callback failed there: what they keep may lack it"
                )
            self.draw(drawn)
            del self._run.last[_LEFT]

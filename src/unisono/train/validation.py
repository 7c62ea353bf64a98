"""When is a run validated, and what follows from it? A line for the user, maybe an early end.

What validation found is kept with the run, so whoever joins it or takes it up knows what was found
and where, and nobody validates where the others do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.checkpoint.every import Every
from unisono.train.progress import told
from unisono.train.run import Run
from unisono.train.stopping import KEY, EarlyStopping, decide

Means = dict[str, Any]


class Validation:
    """The validations of one call of ``fit``; none without a dataset. Final.

    Args:
        run: which is validated.
        compute: finds the means; None: nothing is validated.
        every: how often, in steps or epochs.
        stop_early: when the run ends early; None: it does not.

    Raises:
        ValueError: `every` is no such interval, or something needs validations that there are not.
    """

    def __init__(
        self,
        run: Run,
        compute: Callable[[], Means] | None,
        every: int | str,
        stop_early: EarlyStopping | None,
    ) -> None:
        self._run, self._compute, self._stop_early = run, compute, stop_early
        self._every = Every.read(every, "validate_every")
        if self._every.seconds is not None:
            raise ValueError(
                f"`validate_every` must be in steps or epochs, as clocks differ between workers, "
                f"but is {every!r}: pass `500`, say."
            )
        if stop_early is not None:
            self.must_be("`stop_early`, which looks at validations")

    def must_be(self, for_what: str) -> None:
        """Refuse to go on without a dataset where something needs one."""
        if self._compute is None:
            raise ValueError(
                f"`validate` must be given for {for_what}, but is None: pass a dataset."
            )

    def begin(self) -> None:
        """Begin a loop, after the run has taken up what it goes on from."""
        if self._stop_early is None:
            self._run.go_on()
            self._run.last.pop(KEY, None)
        self._run.last.update(validation=None, validated_at=None)

    @property
    def newest(self) -> Means | None:
        """What has been found after the step that was done last; None if nothing was."""
        last: dict[str, Any] = self._run.last
        is_new = last["validated_at"] == self._run.position.step
        return last["validation"] if is_new else None

    def after_step(self) -> list[str]:
        """Validate if it is time. Collective.

        Returns:
            Lines for the user.
        """
        position = self._run.position
        has_ended = position.batch == 0
        if not self._every.is_due(
            steps=position.step, epoch_ended=position.epoch * has_ended, seconds=0.0
        ):
            return []
        lines = self._now(f"epoch {position.epoch}" if has_ended else f"step {position.step}")
        means = self.newest
        if means is not None and (why := decide(self._stop_early, means, self._run.last)):
            self._run.stop()
            lines.append(why)
        return lines

    def at_end(self) -> list[str]:
        """Validate once more, if steps have been done since the last time. Collective.

        Nothing follows from it: the last checkpoint is written, and a run with other totals would
        not validate here.
        """
        return [] if self.newest is not None else self._now(f"step {self._run.position.step}")

    def _now(self, when: str) -> list[str]:
        if self._compute is None:
            return []
        run, means = self._run, self._compute()
        run.last.update(validation=means, validated_at=run.position.step)
        return [f"{when}: validation {told(means)}"]

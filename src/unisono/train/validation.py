"""When is a run validated? What was found is kept with the run.

So whoever joins it or takes it up knows what was found and where, and nobody validates where the
others do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.checkpoint.every import Every
from unisono.train.run import Run

Means = dict[str, Any]


class Validation:
    """The validations of one call of ``fit``; none without a dataset. Final.

    Args:
        run: which is validated.
        compute: finds the means; None: nothing is validated.
        every: how often, in steps or epochs.

    Raises:
        ValueError: `every` is no such interval.
    """

    def __init__(self, run: Run, compute: Callable[[], Means] | None, every: int | str) -> None:
        self._run, self._compute = run, compute
        self._every = Every.read(every, "validate_every")
        if self._every.seconds is not None:
            raise ValueError(
                f"`validate_every` must be in steps or epochs, as clocks differ between workers, "
                f"but is {every!r}: pass `500`, say."
            )

    @property
    def has_data(self) -> bool:
        """Whether there is anything to validate on."""
        return self._compute is not None

    def must_be(self, for_what: str) -> None:
        """Refuse to go on without a dataset where something needs one."""
        if not self.has_data:
            raise ValueError(
                f"`validate` must be given for {for_what}, but is None: pass a dataset."
            )

    def begin(self) -> None:
        """Begin a loop, after the run has taken up what it goes on from."""
        self._run.last.update(validation=None, validated_at=None)

    @property
    def newest(self) -> Means | None:
        """What has been found after the step that was done last; None if nothing was."""
        last: dict[str, Any] = self._run.last
        is_new = last["validated_at"] == self._run.position.step
        return last["validation"] if is_new else None

    def is_due(self) -> bool:
        """Tell whether it is time, after a step that is done."""
        position = self._run.position
        ended = position.epoch if position.batch == 0 else 0
        return self._every.is_due(steps=position.step, epoch_ended=ended, seconds=0.0)

    def compute(self) -> Means:
        """Validate now. Collective."""
        assert self._compute is not None, "only where there is something to validate on"
        means = self._compute()
        self._run.last.update(validation=means, validated_at=self._run.position.step)
        return means

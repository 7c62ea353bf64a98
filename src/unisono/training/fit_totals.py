"""What did one call of ``fit`` do? Steps, samples and seconds, each step counted once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from unisono.engine.state.run_state import Position
from unisono.plan.samples import SamplePlan
from unisono.training.step import Step


class FitTotals:
    """Counts what a call of ``fit`` does. Final.

    A replacement that joins the others late counts what it sees; what the call did is told by how
    far the run has come, and the time by the leader. The clock starts at once.
    """

    def __init__(self, begun_at: Position, plan: SamplePlan) -> None:
        self.begun_at, self._plan = replace(begun_at), plan
        self._samples = 0
        self._last = begun_at.step - 1
        self._seconds = 0.0
        self._resumed_at_s = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock."""
        now = time.perf_counter()
        self._seconds += now - self._resumed_at_s
        self._resumed_at_s = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave something out of the time."""
        self.pause()
        yield
        self._resumed_at_s = time.perf_counter()

    def count(self, step: Step) -> None:
        """Count a step that is done, unless it has come before a worker was lost."""
        if step.number > self._last:
            self._last = step.number
            self._samples += step.num_samples

    def seconds(self, position: Position) -> float:
        """Tell how long it took to come to `position`; NaN if this worker has seen no step of it.

        One that has seen some of the steps takes the others to have been as fast.
        """
        samples = self.samples_until(position)
        if not samples:
            return self._seconds
        return self._seconds * samples / self._samples if self._samples else math.nan

    def samples_until(self, position: Position) -> int:
        """Count the samples of the call's steps until `position`."""
        return self._samples_before(position) - self._samples_before(self.begun_at)

    def _samples_before(self, position: Position) -> int:
        plan = self._plan
        in_epoch = min(position.batch * plan.batch_size, plan.num_samples)
        return position.epoch * plan.num_samples + in_epoch

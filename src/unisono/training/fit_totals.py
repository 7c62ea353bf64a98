"""The steps, samples and seconds of one call of `fit`."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

from unisono.engine.state.run_state import Position
from unisono.training.epoch_history import samples_trained


@final
class FitTotals:
    """Counts what a call of ``fit`` does.

    A replacement that joins late counts what it sees; the run's position says what the call did,
    and the leader's clock how long it took. The clock starts at once.
    """

    def __init__(self, begun_at: Position, last: Mapping[str, Any]) -> None:
        self.begun_at, self._samples_before = replace(begun_at), samples_trained(last)
        self._samples = 0
        self._last = begun_at.step - 1
        self._begun_at_s = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude a block from the time."""
        paused_at_s = time.perf_counter()
        yield
        self._begun_at_s += time.perf_counter() - paused_at_s

    def count(self, step: int, num_samples: int) -> None:
        """Count a finished step, unless it was counted before a worker was lost."""
        if step > self._last:
            self._last = step
            self._samples += num_samples

    def seconds(self, last: Mapping[str, Any]) -> float:
        """Return the seconds until the state of `last`; NaN if this worker has seen no step.

        A worker that has seen some of the steps assumes that the others took as long.
        """
        samples, seconds = self.samples_until(last), time.perf_counter() - self._begun_at_s
        if not samples:
            return seconds
        return seconds * samples / self._samples if self._samples else math.nan

    def samples_until(self, last: Mapping[str, Any]) -> int:
        """Return the number of samples in the call's steps until the state of `last`."""
        return samples_trained(last) - self._samples_before

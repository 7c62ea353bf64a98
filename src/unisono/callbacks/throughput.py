"""Reports samples a second, waiting and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono.callbacks.callback import Callback, DoneStep, Fit
from unisono.callbacks.summary import Summary
from unisono.procfs import read_text
from unisono.quantities import percent, size


class Throughput(Callback):
    """Prints a line for each epoch, or whenever some seconds have passed. Final.

    ``epoch 3: 3,455 samples/s, waiting 4 %, 12 %, memory 310 MiB, 305 MiB``

    Waiting is the share of the steps' time in which a worker waited for the others, memory what is
    resident, shared memory included; one number for each worker, in the order of ranks. Validations
    are left out of the time. Steps that come again count, as they take time.

    Args:
        every_s: say it when that many seconds have passed; None: at the end of each epoch.
        clock: gives the time in seconds.

    Raises:
        ValueError: `every_s` is not above 0.
    """

    def __init__(
        self, every_s: float | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if every_s is not None and not every_s > 0.0:
            raise ValueError(f"`every_s` must be above 0, but is {every_s}: pass 30, say.")
        self._every_s, self._clock = every_s, clock
        self._newest: int | None = None
        self._samples, self._seconds, self._since_s = 0, 0.0, 0.0
        self._waited_s: dict[int, tuple[float, float]] = {}

    def on_begin(self, fit: Fit) -> None:
        """Start the clock."""
        self._newest = None
        self._clear()

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Count a step."""
        now_s = self._clock()
        self._seconds, self._since_s = self._seconds + now_s - self._since_s, now_s
        self._samples += step.num_samples
        # Of others, times are known when all have met again: those of the step before this one.
        if self._newest is not None:
            self._count_waiting(fit, self._newest)
        self._newest = step.number
        if self._every_s is not None and self._seconds >= self._every_s:
            self._say(fit, f"step {fit.step:,}")

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Leave a validation out of the time."""
        self._since_s += seconds

    def on_epoch_end(self, fit: Fit) -> None:
        """Print the line of an epoch."""
        if self._every_s is None:
            self._say(fit, f"epoch {fit.epoch}")

    def on_went_back(self, fit: Fit, from_step: int) -> None:
        """Forget the step that was torn."""
        self._newest = None

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Print the line of the rest."""
        if self._every_s is not None and self._samples:
            self._say(fit, f"step {fit.step:,}")

    def _count_waiting(self, fit: Fit, step: int) -> None:
        for rank in fit.ranks:
            times = fit.times(rank, step)
            if times is not None:
                waited_s, all_s = self._waited_s.get(rank, (0.0, 0.0))
                self._waited_s[rank] = waited_s + times.waiting_s, all_s + sum(times[1:])

    def _say(self, fit: Fit, when: str) -> None:
        if fit.is_first and self._seconds > 0.0:
            shares = [self._waited_s.get(rank, (0.0, 0.0)) for rank in fit.ranks]
            waiting = [percent(waited_s / all_s) if all_s else "–" for waited_s, all_s in shares]
            memory = [size(_resident_bytes(fit.pid(rank))) for rank in fit.ranks]
            fit.say(
                f"{when}: {self._samples / self._seconds:,.0f} samples/s, "
                f"waiting {', '.join(waiting)}, "
                f"memory {', '.join(memory)}"
            )
        self._clear()

    def _clear(self) -> None:
        self._samples, self._seconds, self._since_s = 0, 0.0, self._clock()
        self._waited_s = {}


def _resident_bytes(pid: int | None) -> int | None:
    """Ask the kernel how much of a process is in memory; None if there is none."""
    fields = read_text(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else None

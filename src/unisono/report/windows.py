"""Which few steps of a long run are drawn worker by worker?

The last ones, the slowest stretch, and those around the first loss of a worker. Times are turned
into seconds of the wall clock as they come, since a run that was resumed has several clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from unisono.report.events import PHASES, StepDone
from unisono.report.phases import MAX_WORKERS, spent_by_rank

MAX_STEPS = 24  # more would be too thin to see
WARM_UP_STEPS = 8  # the first ones of a fit are slow everywhere, and say little
_BEFORE_LOSS = 8
_AFTER_LOSS = 16


@dataclass(frozen=True)
class WorkerStep:
    """What one worker did in one step."""

    rank: int
    begun_unix_s: float
    phases_s: tuple[float, ...]


@dataclass(frozen=True)
class StepTimes:
    """What all did in one step."""

    step: int
    seconds: float
    workers: tuple[WorkerStep, ...]


Window = tuple[StepTimes, ...]
_Kept = tuple[StepDone, "float | None"]


def step_times(step: StepDone, clock_at_unix_s: float | None) -> StepTimes:
    """Place what each worker did on the wall clock.

    Args:
        step: the step.
        clock_at_unix_s: the time on the wall clock when the run's own clock stood at 0. Without it,
            or where a worker's begin is not known, each began as long before the line was written
            as its phases took.
    """
    workers: list[WorkerStep] = []
    for rank, spent in spent_by_rank(step).items():
        if len(workers) == MAX_WORKERS:
            break
        begun_s = step.begun_s[step.ranks.index(rank)] if step.begun_s else None
        if begun_s is None or clock_at_unix_s is None:
            begun_unix_s = step.time_unix_s - spent.total_s
        else:
            begun_unix_s = begun_s + clock_at_unix_s
        workers.append(WorkerStep(rank, begun_unix_s, tuple(spent.phases_s)))
    return StepTimes(step.step, step.seconds or 0.0, tuple(workers))


class Windows:
    """The steps that are kept whole; they are placed in time when they are asked for."""

    def __init__(self) -> None:
        self._last: deque[_Kept] = deque(maxlen=MAX_STEPS)
        self._slowest: tuple[_Kept, ...] = ()
        self._loss: tuple[_Kept, ...] = ()
        self._slowest_s = 0.0
        self._since_start = 0
        self._to_come = 0

    @property
    def last(self) -> Window:
        """The last steps."""
        return _placed(self._last)

    @property
    def slowest(self) -> Window:
        """The stretch of as many steps that took longest; empty where the run is too short.

        The first steps of a fit are passed over.
        """
        return _placed(self._slowest)

    @property
    def loss(self) -> Window:
        """Those around the first loss of a worker, or empty."""
        return _placed(self._loss)

    def start(self) -> None:
        """A fit begins."""
        self._since_start = 0

    def lose(self) -> None:
        """A worker is lost before the next step."""
        if not self._loss:
            self._loss = tuple(self._last)[-_BEFORE_LOSS:]
            self._to_come = _AFTER_LOSS

    def add(self, step: StepDone, clock_at_unix_s: float | None) -> None:
        """Add the next step; ``clock_at_unix_s`` is as for :func:`step_times`."""
        if not any(step.phases):
            return
        self._last.append((step, clock_at_unix_s))
        self._since_start += 1
        if self._to_come:
            self._loss += ((step, clock_at_unix_s),)
            self._to_come -= 1
        # A quarter of a stretch apart is near enough.
        is_warm = self._since_start >= MAX_STEPS + WARM_UP_STEPS
        if is_warm and self._since_start % (MAX_STEPS // 4) == 0:
            seconds = sum(kept.seconds or 0.0 for kept, _ in self._last)
            if seconds > self._slowest_s:
                self._slowest_s, self._slowest = seconds, tuple(self._last)


def _placed(kept: Iterable[_Kept]) -> Window:
    placed = (step_times(step, clock_at_unix_s) for step, clock_at_unix_s in kept)
    return tuple(step for step in placed if step.workers)


def phase_begins(worker: WorkerStep) -> list[float]:
    """Return when each phase of a worker begins, drawn one after another."""
    begins, at = [], worker.begun_unix_s
    for seconds in worker.phases_s:
        begins.append(at)
        at += seconds
    assert len(begins) == len(PHASES)
    return begins

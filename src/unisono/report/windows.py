"""Which few steps of a long run are drawn worker by worker?

The last ones, the slowest stretch, and those around the first loss of a worker. Times are turned
into seconds of the wall clock as they come, since a run that was resumed has several clocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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


@dataclass
class Windows:
    """The steps that are kept whole.

    Attributes:
        last: the last steps.
        slowest: the stretch of as many steps that took longest, those at the begin of a fit
            passed over; empty where the run is too short to tell.
        loss: those around the first loss of a worker, or empty.
    """

    last: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    slowest: Window = ()
    loss: tuple[StepTimes, ...] = ()
    _slowest_s: float = 0.0
    _since_start: int = 0
    _to_come: int = 0

    def start(self) -> None:
        """A fit begins."""
        self._since_start = 0

    def lose(self) -> None:
        """A worker is lost before the next step."""
        if not self.loss:
            self.loss = tuple(self.last)[-_BEFORE_LOSS:]
            self._to_come = _AFTER_LOSS

    def add(self, step: StepTimes) -> None:
        """Add the next step."""
        if not step.workers:
            return
        self.last.append(step)
        self._since_start += 1
        if self._to_come:
            self.loss += (step,)
            self._to_come -= 1
        # A quarter of a stretch apart is near enough.
        is_warm = self._since_start >= MAX_STEPS + WARM_UP_STEPS
        if is_warm and self._since_start % (MAX_STEPS // 4) == 0:
            seconds = sum(one.seconds for one in self.last)
            if seconds > self._slowest_s:
                self._slowest_s, self.slowest = seconds, tuple(self.last)


def phase_begins(worker: WorkerStep) -> list[float]:
    """Return when each phase of a worker begins, drawn one after another."""
    begins, at = [], worker.begun_unix_s
    for seconds in worker.phases_s:
        begins.append(at)
        at += seconds
    assert len(begins) == len(PHASES)
    return begins

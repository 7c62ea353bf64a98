"""Which few steps of a long run are drawn worker by worker?

The last ones, the slowest stretch, and those around the first loss of a worker. Times are turned
into seconds of the wall clock when they are asked for; a run that was resumed has several clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TypeAlias

from unisono.report.events import StepDone
from unisono.report.phases import MAX_WORKERS, spent_by_rank

MAX_STEPS = 24  # more would be too thin to see
WARM_UP_STEPS = 8  # the first ones of a fit are slow everywhere, and say little
_BEFORE_LOSS = 8
_AFTER_LOSS = 16


@dataclass(frozen=True)
class WorkerStep:
    """What one worker did in one step."""

    step: int
    rank: int
    begun_unix_s: float
    phases_s: tuple[float, ...]

    @property
    def begins_unix_s(self) -> list[float]:
        """When each phase begins, drawn one after another."""
        return list(accumulate(self.phases_s[:-1], initial=self.begun_unix_s))

    @property
    def end_unix_s(self) -> float:
        """When the last one ends."""
        return self.begun_unix_s + sum(self.phases_s)


Window: TypeAlias = "tuple[tuple[WorkerStep, ...], ...]"  # the workers of each step
Kept: TypeAlias = "tuple[StepDone, float | None]"  # a step, and its clock as for worker_steps


def worker_steps(step: StepDone, clock_at_unix_s: float | None) -> tuple[WorkerStep, ...]:
    """Place what each worker did in a step on the wall clock.

    Args:
        step: the step.
        clock_at_unix_s: the time on the wall clock when the run's own clock stood at 0. Without it,
            or where a worker's begin is not known, each began as long before the line was written
            as its phases took.
    """
    begun_s = dict(zip(step.ranks, step.begun_s, strict=False))
    placed = []
    for rank, spent in islice(spent_by_rank(step).items(), MAX_WORKERS):
        own_s = begun_s.get(rank)
        if own_s is None or clock_at_unix_s is None:
            begun_unix_s = step.time_unix_s - spent.total_s
        else:
            begun_unix_s = own_s + clock_at_unix_s
        placed.append(WorkerStep(step.step, rank, begun_unix_s, tuple(spent.phases_s)))
    return tuple(placed)


@dataclass
class Windows:
    """The steps that are kept whole, each with what its clock says. Final."""

    last: deque[Kept] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    slowest: tuple[Kept, ...] = ()  # as many that took longest, not the first ones of a fit
    loss: tuple[Kept, ...] = ()  # those around the first loss of a worker
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

    def add(self, step: StepDone, clock_at_unix_s: float | None) -> None:
        """Add the next step; ``clock_at_unix_s`` is as for :func:`worker_steps`."""
        if not any(step.phases):
            return
        self.last.append((step, clock_at_unix_s))
        self._since_start += 1
        if self._to_come:
            self.loss += ((step, clock_at_unix_s),)
            self._to_come -= 1
        # A quarter of a stretch apart is near enough.
        is_warm = self._since_start >= MAX_STEPS + WARM_UP_STEPS
        if is_warm and self._since_start % (MAX_STEPS // 4) == 0:
            seconds = sum(kept.seconds or 0.0 for kept, _ in self.last)
            if seconds > self._slowest_s:
                self._slowest_s, self.slowest = seconds, tuple(self.last)


def placed(kept: Iterable[Kept]) -> Window:
    """Place steps that were kept whole on the wall clock."""
    return tuple(filter(None, (worker_steps(step, clock) for step, clock in kept)))

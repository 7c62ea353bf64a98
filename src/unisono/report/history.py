"""What happened in a run, kept small enough to draw, however long it was?

One pass over the event file. What a million steps say is folded into stretches (``series.py``,
``phases.py``), a few steps are kept whole (``windows.py``), and what is rare is kept up to a bound.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import Enum

from unisono.report.events import (
    Checkpoint,
    End,
    Evaluation,
    Event,
    Failure,
    Start,
    StepDone,
    WentBack,
    Workers,
)
from unisono.report.follow import EventReader, events_file
from unisono.report.phases import PhaseTimes
from unisono.report.series import Series
from unisono.report.windows import Windows

MAX_METRICS = 12
MAX_GROUPS = 6
MAX_MARKS = 200
MAX_EVALUATIONS = 20_000


class Kind(Enum):
    """What sort of thing happened; the value is its name on the page."""

    RESUMED = "resumed"
    LOST = "lost"
    JOINED = "joined"
    CHANGED = "workers"
    WENT_BACK = "went back"
    NOT_FINITE = "not finite"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True)
class Mark:
    """Something that happened once, at a step."""

    step: int
    time_unix_s: float
    kind: Kind
    text: str


@dataclass
class Validation:
    """A metric's values on the validation set, by step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def best(self, *, is_low_good: bool) -> tuple[int, float] | None:
        """Return the step and the value of the best finite one."""
        finite = [(v, s) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]
        if not finite:
            return None
        value, step = min(finite) if is_low_good else max(finite, key=lambda pair: pair[0])
        return step, value


class History:
    """What happened in a run, as far as its events have been added.

    Attributes:
        name: what the run is called where there are several.
        first: the first start; it says what the run is.
        latest: the last start.
        num_starts: how often a fit began.
        ended: how the run ended, or None where nothing says that it did.
        num_steps: how many steps there are.
        last_step: the last of them, or None.
        num_samples: how many samples they took.
        wall_s: how long the fits lasted, without what was between them.
        means: each metric of training.
        validation: each metric of evaluation.
        learning_rates: one series a group of parameters.
        marks: what happened once, in order; at most :data:`MAX_MARKS`.
        num_marks: how many there were.
        num_out_of_order: steps that do not come after the one before; they are left out.
        num_unreadable: lines that could not be read.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.first: Start | None = None
        self.latest: Start | None = None
        self.num_starts = 0
        self.ended: End | Failure | None = None
        self.num_steps = 0
        self.last_step: int | None = None
        self.last_epoch: int | None = None
        self.num_samples = 0
        self.wall_s = 0.0
        self.last_time_unix_s: float | None = None
        self.means: dict[str, Series] = {}
        self.validation: dict[str, Validation] = {}
        self.learning_rates: list[Series] = []
        self.gradient_norm = Series()
        self.samples_per_second = Series(max_buckets=300)
        self.phases = PhaseTimes()
        self.windows = Windows()
        self.marks: list[Mark] = []
        self.num_marks = 0
        self.ranks: tuple[int, ...] = ()
        self.num_lost = 0
        self.num_went_back = 0
        self.num_checkpoints = 0
        self.last_checkpoint: int | None = None
        self.num_evaluations = 0
        self.metrics_left_out: set[str] = set()
        self.num_out_of_order = 0
        self.num_unreadable = 0

    @property
    def mean_samples_per_second(self) -> float | None:
        """What the run told in its end, or else samples over the time of steps."""
        if self._told is not None and self._told.samples_per_second is not None:
            return self._told.samples_per_second
        kept = self.samples_per_second.values
        return sum(one.total for one in kept) / sum(one.weight for one in kept) if kept else None

    @property
    def seconds(self) -> float:
        """What the run told in its end, or else the time from line to line."""
        if self._told is not None and self._told.seconds is not None:
            return self._told.seconds
        return self.wall_s

    @property
    def _told(self) -> End | None:
        """The end of a run that was fitted once; another's tells of its last fit alone."""
        return self.ended if isinstance(self.ended, End) and self.num_starts == 1 else None

    @property
    def clock_at_unix_s(self) -> float | None:
        """The time on the wall clock at which the latest fit's own clock stood at 0."""
        if self.latest is None or self.latest.clock_s is None:
            return None
        at = self.latest.time_unix_s - self.latest.clock_s
        return at if math.isfinite(at) else None

    def add(self, event: Event) -> None:
        """Add the next event."""
        self._add_time(event)
        if isinstance(event, StepDone):
            self._add_step(event)
        elif isinstance(event, Start):
            self._add_start(event)
        elif isinstance(event, Workers):
            self._add_workers(event)
        elif isinstance(event, WentBack):
            self._add_went_back(event)
        elif isinstance(event, Evaluation):
            self._add_evaluation(event)
        elif isinstance(event, Checkpoint):
            self.num_checkpoints += 1
            self.last_checkpoint = event.step
        else:
            self._add_last(event)

    def _add_time(self, event: Event) -> None:
        if not math.isfinite(event.time_unix_s):
            return
        if self.last_time_unix_s is not None and not isinstance(event, Start):
            self.wall_s += max(event.time_unix_s - self.last_time_unix_s, 0.0)
        self.last_time_unix_s = event.time_unix_s

    def _add_start(self, start: Start) -> None:
        if self.first is None:
            self.first = start
        elif start.step > 0:
            workers = f" on {start.world_size} workers" if start.world_size else ""
            self._mark(start, Kind.RESUMED, f"started again at step {start.step}{workers}")
        self.latest, self.ended = start, None
        self.num_starts += 1
        self.ranks = start.ranks or self.ranks
        self.windows.start()

    def _add_step(self, step: StepDone) -> None:
        if self.last_step is not None and step.step <= self.last_step:
            self.num_out_of_order += 1
            return
        self.last_step, self.last_epoch = step.step, step.epoch
        self.num_steps += 1
        num_samples = step.num_samples or 0
        self.num_samples += num_samples
        for name, value in step.means.items():
            self._add_mean(step, name, value)
        for group, rate in enumerate(step.learning_rates[:MAX_GROUPS]):
            if group == len(self.learning_rates):
                self.learning_rates.append(Series())
            self.learning_rates[group].add(step.step, rate)
        if step.gradient_norm is not None:
            self.gradient_norm.add(step.step, step.gradient_norm)
        if step.seconds:
            self.samples_per_second.add(step.step, num_samples / step.seconds, step.seconds)
        self.ranks = step.ranks or self.ranks
        self.phases.add(step)
        self.windows.add(step, self.clock_at_unix_s)

    def _add_mean(self, step: StepDone, name: str, value: float) -> None:
        if name not in self.means and len(self.means) == MAX_METRICS:
            self._leave_out(name)
            return
        series = self.means.setdefault(name, Series())
        was_finite = series.first_not_finite is None
        series.add(step.step, value, step.num_samples or 1)
        if was_finite and not math.isfinite(value):
            self._mark(step, Kind.NOT_FINITE, f"{name} is {value} for the first time")

    def _add_workers(self, event: Workers) -> None:
        if event.lost:
            kind = Kind.LOST
            self.windows.lose()
        else:
            kind = Kind.JOINED if event.joined else Kind.CHANGED
        self.num_lost += len(event.lost)
        self.ranks = event.ranks or self.ranks
        self._mark(event, kind, event.in_words)

    def _add_went_back(self, event: WentBack) -> None:
        self.num_went_back += 1
        text = f"went back to step {event.step}"
        if event.from_step is not None:
            again = event.from_step - event.step
            text += f" from step {event.from_step}: {again} came again, with the same result"
        self._mark(event, Kind.WENT_BACK, text)

    def _add_evaluation(self, event: Evaluation) -> None:
        self.num_evaluations += 1
        for name, value in event.means.items():
            if name not in self.validation and len(self.validation) == MAX_METRICS:
                self._leave_out(name)
                continue
            curve = self.validation.setdefault(name, Validation())
            if len(curve.steps) < MAX_EVALUATIONS:
                curve.steps.append(event.step)
                curve.values.append(value)

    def _add_last(self, event: End | Failure) -> None:
        self.ended = event
        if isinstance(event, Failure):
            whose = "" if event.rank is None else f"worker {event.rank}: "
            self._mark(event, Kind.FAILED, f"{whose}{event.error}: {event.message}")
        elif event.stopped_early:
            self._mark(event, Kind.ENDED, f"stopped early after {event.step} steps")

    def _mark(self, event: Event, kind: Kind, text: str) -> None:
        self.num_marks += 1
        if len(self.marks) < MAX_MARKS:
            self.marks.append(Mark(event.step, event.time_unix_s, kind, text))

    def _leave_out(self, name: str) -> None:
        if len(self.metrics_left_out) < MAX_METRICS:
            self.metrics_left_out.add(name)


def gather(directory: str | os.PathLike[str], name: str = "") -> History:
    """Read what happened in a run.

    Args:
        directory: the run's folder.
        name: what it is called where there are several.

    Raises:
        ValueError: it is no run's folder, or its event file cannot be read or says nothing.
        DataFormatError: the file was written by a newer version.
    """
    path = events_file(directory)
    reader = EventReader(path)
    history = History(name)
    for event in reader.new_events():
        history.add(event)
    history.num_unreadable = reader.num_unreadable
    if history.first is None and not history.num_steps:
        told = f" ({reader.num_unreadable} lines cannot be read)" if reader.num_unreadable else ""
        raise ValueError(
            f"{str(path)!r} must tell of a run, but tells nothing{told}: name the folder of a run "
            "that has begun."
        )
    return history


def identity(history: History) -> dict[str, object]:
    """Return all that fixes the bits of a run, by name."""
    start = history.first
    if start is None:
        return {}
    found: dict[str, object] = {
        key.replace("_", " "): value for key, value in start.identity.items()
    }
    facts = {
        "seed": start.seed,
        "shards": start.shards,
        "batch size": start.batch_size,
        "dataset length": start.num_samples,
    }
    return found | {
        key: value for key, value in facts.items() if value is not None and key not in found
    }

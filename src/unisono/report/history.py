"""What happened in a run, kept small enough to draw, however long it was?

One pass over the event file. What a million steps say is folded into stretches (``series.py``,
``phases.py``), and what is rare is kept up to a bound.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field

from unisono.report.events import Evaluation, Event, Mark, StepDone, mark_of
from unisono.report.follow import EventReader, events_file
from unisono.report.phases import PhaseTimes
from unisono.report.run_progress import RunProgress
from unisono.report.series import Series
from unisono.report.slowdown import Slowdown

MAX_METRICS = 12
MAX_MARKS = 200


@dataclass
class History:
    """What happened in a run, as far as its events have been added. Final."""

    name: str = ""  # what the run is called where there are several
    progress: RunProgress = field(default_factory=RunProgress)
    means: dict[str, Series] = field(default_factory=dict)  # each metric of training
    validation: dict[str, Series] = field(default_factory=dict)  # …of evaluation
    best: dict[str, tuple[int, float]] = field(
        default_factory=dict
    )  # least loss, greatest of others, with its step
    metrics_left_out: set[str] = field(default_factory=set)  # as there are too many
    learning_rate: Series = field(default_factory=Series)  # of the first group of parameters
    gradient_norm: Series = field(default_factory=Series)
    samples_per_second: Series = field(default_factory=Series)
    phases: PhaseTimes = field(default_factory=PhaseTimes)  # where the time goes
    findings: tuple[Slowdown, ...] | None = None  # what slows the latest fit; None of too few steps
    marks: list[Mark] = field(default_factory=list)  # what happened once, in order
    num_marks: int = 0  # how many there were; at most MAX_MARKS are kept
    num_unreadable: int = 0  # lines that could not be read

    @property
    def mean_samples_per_second(self) -> float | None:
        """Samples over the time of steps."""
        kept = self.samples_per_second.values
        return sum(one.total for one in kept) / sum(one.weight for one in kept) if kept else None

    def add(self, event: Event) -> None:
        """Add the next event."""
        if not self.progress.add(event):
            return
        if event is not self.progress.first and (mark := mark_of(event)) is not None:
            self._mark(mark)
        if isinstance(event, StepDone):
            self._add_step(event)
        elif isinstance(event, Evaluation):
            self._add_evaluation(event)

    def _add_step(self, step: StepDone) -> None:
        num_samples = step.num_samples or 0
        for name, value in step.means.items():
            if (series := self._curve(self.means, name)) is not None:
                series.add(step.step, value, num_samples or 1)
                if series.first_not_finite == step.step:
                    text = f"{name} is {value} for the first time"
                    self._mark(Mark(step.step, step.time_unix_s, text))
        if step.learning_rates:
            self.learning_rate.add(step.step, step.learning_rates[0])
        if step.gradient_norm is not None:
            self.gradient_norm.add(step.step, step.gradient_norm)
        if step.seconds:
            self.samples_per_second.add(step.step, num_samples / step.seconds, step.seconds)
        self.phases.add(step)

    def _add_evaluation(self, event: Evaluation) -> None:
        for name, value in event.means.items():
            if (series := self._curve(self.validation, name)) is not None:
                series.add(event.step, value)
                found = self.best.get(name)
                is_better = found is None or (
                    value < found[1] if name == "loss" else value > found[1]
                )
                if math.isfinite(value) and is_better:
                    self.best[name] = event.step, value

    def _curve(self, curves: dict[str, Series], name: str) -> Series | None:
        """Return the curve of a metric; None if there are too many."""
        if name not in curves:
            if len(curves) == MAX_METRICS:
                if len(self.metrics_left_out) < MAX_METRICS:
                    self.metrics_left_out.add(name)
                return None
            curves[name] = Series()
        return curves[name]

    def _mark(self, mark: Mark) -> None:
        self.num_marks += 1
        if len(self.marks) < MAX_MARKS:
            self.marks.append(mark)


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
    if history.progress.latest is not None:
        from unisono.report.slowness import slowdowns_in  # numpy is loaded with it

        with suppress(OSError):  # it has just been removed
            history.findings = slowdowns_in(path, vars(history.progress.latest))
    if history.progress.first is None and not history.progress.num_steps:
        told = f" ({reader.num_unreadable} lines cannot be read)" if reader.num_unreadable else ""
        raise ValueError(
            f"{str(path)!r} must tell of a run, but tells nothing{told}: name the folder of a run "
            "that has begun."
        )
    return history


def identity(history: History) -> dict[str, object]:
    """Return all that fixes the bits of a run, by name."""
    start = history.progress.first
    facts = start.identity if start else {}
    return {key.replace("_", " "): value for key, value in facts.items()}

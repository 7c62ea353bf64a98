"""What happened in a run, kept small enough to draw, however long it was?

At most ``max_stretches`` values are kept, however many are added: at that number, every two
neighbours become one, and each new one covers twice as many values. ::

    1 2 3 4 │ 5      ─►  12 34 5·      ─►  12 34 56 78 │ 9      ─►  1234 5678 9···

The time of a step beyond its phases (callbacks, evaluation, the detection of a lost worker) is
called *between*.
"""

from __future__ import annotations

import gc
import math
import operator
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress, groupby, islice
from pathlib import Path
from typing import cast, final

from unisono.runtime.notices import plural
from unisono.tools.report.run_progress import Mark, RunProgress, said_of
from unisono.training.events.events import NUMBERS, PHASES, Evaluation, Event, Slowdown, StepEvent
from unisono.training.events.follow import EventReader, events_file

_AT_ONCE = 128  # events that are processed together


@dataclass(slots=True)
class Values:
    """The values of some consecutive steps; those that are not finite are only counted."""

    first_step: int
    last_step: int
    total: float = 0.0
    weight: float = 0.0
    num_not_finite: int = 0

    def add(self, steps: Sequence[int], values: Sequence[float], weights: Sequence[float]) -> None:
        """Add the values of the steps that follow."""
        self.last_step = steps[-1]
        total = sum(map(operator.mul, values, weights), self.total)
        if not math.isfinite(total):
            finite = [*map(math.isfinite, values)]
            self.num_not_finite += finite.count(False)
            values, weights = [*compress(values, finite)], [*compress(weights, finite)]
            total = sum(map(operator.mul, values, weights), self.total)
        self.total = total
        self.weight = sum(weights, self.weight)

    @property
    def mean(self) -> float | None:
        """The weighted mean of the finite values; None if there are none."""
        return self.total / self.weight if self.weight > 0 else None

    @property
    def middle_step(self) -> float:
        """The step at which the stretch is drawn."""
        return (self.first_step + self.last_step) / 2


@final
class Series:
    """One number per step, kept small."""

    def __init__(self, max_stretches: int = 300) -> None:
        self.values: list[Values] = []  # stretches of `width` values; the last may have fewer
        self.width = 1
        self.last: float | None = None  # value, which may be NaN or infinite
        self.last_step: int | None = None
        self.first_not_finite: int | None = None  # step
        self._max = max_stretches
        self._num_in_last = 1

    def add(self, step: int, value: float, weight: float = 1.0) -> None:
        """Add a step's value, with its weight in means."""
        self.add_all([step], [value], [weight])

    def add_all(
        self, steps: Sequence[int], values: Sequence[float], weights: Sequence[float] | None = None
    ) -> None:
        """Add the values of some steps, in order."""
        weights = weights or [1.0] * len(steps)
        begin = 0
        while begin < len(steps):
            if self._num_in_last == self.width and len(self.values) == self._max:
                self._halve()
            if self._num_in_last == self.width:
                self.values.append(Values(steps[begin], steps[begin]))
                self._num_in_last = 0
            end = min(begin + self.width - self._num_in_last, len(steps))
            self.values[-1].add(steps[begin:end], values[begin:end], weights[begin:end])
            self._num_in_last += end - begin
            begin = end
            if self.first_not_finite is None and self.values[-1].num_not_finite:
                pairs = zip(steps, values, strict=True)
                self.first_not_finite = next(s for s, v in pairs if not math.isfinite(v))
        if steps:
            self.last, self.last_step = values[-1], steps[-1]

    def _halve(self) -> None:
        self._num_in_last = self.width * (2 - len(self.values) % 2)
        for one, next_one in zip(self.values[::2], self.values[1::2], strict=False):
            one.last_step = next_one.last_step
            one.total += next_one.total
            one.weight += next_one.weight
            one.num_not_finite += next_one.num_not_finite
        del self.values[1::2]
        self.width *= 2


@dataclass(slots=True)
class Spent:
    """Seconds of a worker in each phase, and the number of steps."""

    phases_s: list[float]
    num_steps: int

    @property
    def shares(self) -> Mapping[str, float]:
        """The fraction of time that each phase took; empty if there was none."""
        total_s = sum(self.phases_s)
        return {name: s / total_s for name, s in zip(PHASES, self.phases_s, strict=True) if total_s}

    @property
    def working_s(self) -> float | None:
        """The seconds per step of all phases except waiting; None if there were none."""
        working_s = sum(self.phases_s) - self.phases_s[PHASES.index("waiting")]
        return working_s / self.num_steps if any(self.phases_s) else None


@final
class PhaseTimes:
    """Where the time goes: over the run, averaged over workers, and in total by rank."""

    def __init__(self) -> None:
        self.over_steps = {name: Series(200) for name in (*PHASES, "between")}
        self.by_rank: dict[int, Spent] = {}

    def add(self, steps: Iterable[StepEvent]) -> None:
        """Add steps; those without any columns are skipped."""
        for ranks, group in groupby(steps, key=operator.attrgetter("ranks")):
            self._add_of(ranks, list(group))

    def _add_of(self, ranks: tuple[int, ...], steps: list[StepEvent]) -> None:
        import numpy as np  # imported here, so that other commands start fast

        nothing = (None,) * len(ranks)
        columns = [column or nothing for step in steps for column in step.phases]
        times = np.array([*chain.from_iterable(columns)], dtype=float)
        times = times.reshape(len(steps), len(PHASES), len(ranks))
        is_known = ~np.isnan(times)
        took_part = is_known.any(axis=1)  # a worker without an entry was lost in the step
        times = np.where(is_known, times, 0.0)
        for rank, phases_s, num_steps in zip(
            ranks, times.sum(axis=0).T.tolist(), took_part.sum(axis=0).tolist(), strict=True
        ):
            if num_steps:
                spent = self.by_rank.setdefault(rank, Spent([0.0] * len(PHASES), 0))
                spent.phases_s = list(map(operator.add, spent.phases_s, phases_s))
                spent.num_steps += num_steps
        num_workers = took_part.sum(axis=1)
        told = num_workers > 0
        means = times.sum(axis=2)[told] / num_workers[told, None]
        seconds = np.array([step.seconds or 0.0 for step in steps])[told]
        between = np.maximum(seconds - means.sum(axis=1), 0.0)
        numbers = [step.step for step, is_told in zip(steps, told, strict=True) if is_told]
        rows = [*means.T.tolist(), between.tolist()]
        for series, values in zip(self.over_steps.values(), rows, strict=True):
            series.add_all(numbers, values)


@final
@dataclass
class History:
    """What happened in a run, as far as its events have been added."""

    name: str = ""  # the run's name among several
    folder: Path | None = None  # of the event file, if it was read from one
    progress: RunProgress = field(default_factory=RunProgress)
    # each metric of training, and of evaluation
    means: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    validation: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    # the least loss, the greatest score, otherwise the last value, with its step
    best: dict[str, tuple[int, float]] = field(default_factory=dict)
    learning_rate: Series = field(default_factory=Series)  # of the first group of parameters
    # numbers of steps, by their names in the event file
    numbers: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    samples_per_second: Series = field(default_factory=Series)
    phases: PhaseTimes = field(default_factory=PhaseTimes)  # where the time goes
    findings: tuple[Slowdown, ...] | None = None  # what slows the latest fit; None: too few steps
    marks: list[Mark] = field(default_factory=list)  # what happened once, in order
    num_unreadable: int = 0  # lines that could not be read

    @property
    def mean_samples_per_second(self) -> float | None:
        """Samples per second of the steps' time."""
        kept = self.samples_per_second.values
        return sum(one.total for one in kept) / sum(one.weight for one in kept) if kept else None

    def add(self, events: Iterable[Event]) -> None:
        """Add the events that follow."""
        for kind, group in groupby(events, type):
            while some := list(islice(group, _AT_ONCE)):
                for event in some:
                    self.progress.add(event)
                if kind is StepEvent:
                    self._add_steps(cast("list[StepEvent]", some))
                    continue
                for event in some:
                    if event is not self.progress.first and (said := said_of(event)) is not None:
                        self.marks.append(Mark(event.step, event.time_unix_s, said))
                    if isinstance(event, Evaluation):
                        self._add_evaluation(event)

    def _add_steps(self, steps: list[StepEvent]) -> None:
        self._add_means(steps)
        some = [one for one in steps if one.learning_rates]
        self.learning_rate.add_all(_numbers(some), [one.learning_rates[0] for one in some])
        for name in NUMBERS:
            some = [one for one in steps if getattr(one, name) is not None]
            self.numbers[name].add_all(_numbers(some), [getattr(one, name) for one in some])
        some = [one for one in steps if one.seconds]
        seconds = [one.seconds or 0.0 for one in some]
        speeds = [(one.num_samples or 0) / s for one, s in zip(some, seconds, strict=True)]
        self.samples_per_second.add_all(_numbers(some), speeds, seconds)
        self.phases.add(steps)

    def _add_means(self, steps: list[StepEvent]) -> None:
        marks = []
        for name in dict.fromkeys(chain.from_iterable(step.means for step in steps)):
            series = self.means[name]
            was_finite = series.first_not_finite is None
            some = [one for one in steps if name in one.means]
            values = [one.means[name] for one in some]
            series.add_all(_numbers(some), values, [one.num_samples or 1 for one in some])
            if was_finite and (first := series.first_not_finite) is not None:
                wrong = next(one for one in some if one.step == first)
                text = f"{name} is {wrong.means[name]} for the first time"
                marks.append(Mark(first, wrong.time_unix_s, text))
        self.marks += sorted(marks, key=lambda mark: mark.step)

    def _add_evaluation(self, event: Evaluation) -> None:
        for name, value in event.means.items():
            self.validation[name].add(event.step, value)
            found = self.best.get(name)
            is_better = found is None or is_at_least_as_good(name, value, found[1])
            if is_better and (math.isfinite(value) or word_of_best(name) == "Last"):
                self.best[name] = event.step, value


_LOWER = ("loss", "error", "perplexity", "mae", "mse", "rmse")
_HIGHER = ("accuracy", "f1", "auc", "auroc", "iou", "precision", "recall", "bleu", "dice", "r2")


def word_of_best(metric: str) -> str:
    """Return what the kept value of a metric is; which values are good is mostly unknown."""
    return "Best" if metric.lower().endswith((*_LOWER, *_HIGHER)) else "Last"


def is_at_least_as_good(metric: str, value: float, before: float) -> bool:
    """Return whether a later value of a metric replaces an earlier one."""
    name = metric.lower()
    if name.endswith(_LOWER):
        return value < before
    return value > before or not name.endswith(_HIGHER)


def _numbers(steps: Iterable[StepEvent]) -> list[int]:
    return [one.step for one in steps]


def gather(directory: str | os.PathLike[str], name: str = "") -> History:
    """Return what happened in a run; raise ValueError or DataFormatError if it cannot be read."""
    path = events_file(directory)
    reader, history = EventReader(path), History(name, path.parent.resolve())
    was_enabled = gc.isenabled()
    gc.disable()  # events are many, without reference cycles
    try:
        history.add(reader.new_events())
    finally:
        if was_enabled:
            gc.enable()
    history.num_unreadable = reader.num_unreadable
    if history.progress.latest is not None:
        from unisono.training.events.slowness import slowdowns_in  # numpy is loaded with it

        with suppress(OSError):  # the file was just removed
            history.findings = slowdowns_in(path, vars(history.progress.latest))
    if history.progress.first is None and not history.progress.num_steps:
        told = ""
        if reader.num_unreadable:
            told = f" ({plural(reader.num_unreadable, 'line')} cannot be read)"
        raise ValueError(
            f"{str(path)!r} must describe a run, but has no events{told}: name the folder of a run "
            "that has begun."
        )
    return history


def identity(history: History) -> dict[str, object]:
    """Return everything that determines the bits of a run, by name."""
    start = history.progress.first
    facts = start.identity if start else {}
    # The name that checkpoints use.
    words = {"as usual": "torch's defaults"}
    return {
        key.replace("_", " "): words.get(value, value) if isinstance(value, str) else value
        for key, value in facts.items()
    }

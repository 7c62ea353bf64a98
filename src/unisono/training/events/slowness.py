"""What makes steps slower than they could be? Decided from the times of some windows of steps.

Each worker does its part of a step, then waits for the slowest one::

    worker 0   between │ loading │ forward │ backward │ ..waiting.. │ sum, update
    worker 1   between │ loading │ forward ────────────│ backward   │ sum, update
                                           └ excess: longer than its share and its core explain

Cores of one machine differ: a slower one makes all phases longer by a factor, while a problem with
a worker's samples or passes makes a few phases longer by some time. So a worker's core is rated by
the median of the ratios between its phases and those of the others, and a phase is slow if it takes
longer than this ratio explains, in nearly all steps.

What one window shows may be chance; it becomes a finding if two windows show it, and if it costs
enough in all windows. Medians decide within a window. Nothing here reads a clock or a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unisono.runtime.notices import duration
from unisono.training.events.events import Slowdown, SlowdownCause
from unisono.training.events.step_sample import Seconds, StepSample, StepWindow, sample_of

COSTS = 0.05  # of the steps' time: less is not reported
SLOW_BY = 0.08  # of the usual time: workers always differ by less
_FLOOR_S = 5e-5  # the leader's work for all takes less
_NEARLY_ALL = 0.75  # of the steps, at least
_NAMED = 0.25  # of the longest excess: a phase with less is not named
_TELLING_S = 1e-5  # a shorter phase says nothing about a core
_ERRORS = 5.0  # standard errors: chance does not explain more
_OF_MEDIAN = 1.4826 * 1.2533  # median deviation to standard deviation, its mean's to its median's
_BUSY = 0.1  # of the time: workers on a free machine wait less
_LOADING_COSTS, _BETWEEN_COSTS, _WORTH_S = 0.2, 0.15, 1e-3

_BETWEEN, _LOADING, _FORWARD, _BACKWARD = range(4)  # in COLUMNS
_OWN = [_BETWEEN, _LOADING, _FORWARD, _BACKWARD]  # what a worker does before it waits
_BY_SHARE = [_LOADING, _FORWARD, _BACKWARD]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is needed about a run besides the times of its steps."""

    shards: int  # S; 0 if they are divided by the speed of devices
    loader_workers: int = 0  # per worker
    is_on_host: bool = True  # elsewhere passes end when the host waits for them


def slowdowns_in(
    path: Path, start: Mapping[str, Any], *, is_newest: bool = False
) -> tuple[Slowdown, ...] | None:
    """Return what costs time in a call of ``fit``, the costliest first; None for too few steps.

    `start` is its line ``start``; with `is_newest`, only the newest steps are judged.
    """
    since_step, batch_size = start["step"], start["batch_size"] or 0
    sample = sample_of(path, since_step=since_step, batch_size=batch_size, is_newest=is_newest)
    if len(sample.windows) < 2:
        return None
    is_on_host = "device" not in start["machine"]
    return judge(sample, RunFacts(start["shards"] or 0, start["loader_workers"] or 0, is_on_host))


def judge(sample: StepSample, facts: RunFacts) -> tuple[Slowdown, ...]:
    """Return what costs time in some steps, the costliest first."""
    found: dict[tuple[SlowdownCause, int | None], list[Slowdown]] = {}
    for window in sample.windows:
        for one in _Judgement(window, facts).findings():
            found.setdefault((one.cause, one.rank), []).append(one)
    told = []
    for (_, rank), several in found.items():
        usual = sorted(several, key=lambda one: one.cost)[len(several) // 2]
        cost = sum(one.cost for one in several) / len(sample.windows)
        excused = 0.0 if rank is None else _delayed_more(sample.delayed, rank)
        if len(several) > 1 and cost - excused >= COSTS:
            told.append(replace(usual, cost=cost))
    delayed = list(sample.delayed.values())
    if delayed and (part := sum(delayed) / len(delayed)) >= _BUSY:
        remedy = "start fewer workers or loader processes, or stop what else runs there"
        told.append(Slowdown(SlowdownCause.BUSY, part, "the workers wait for a free core", remedy))
    return tuple(sorted(told, key=lambda one: -one.cost))


class _Judgement:
    def __init__(self, window: StepWindow, facts: RunFacts) -> None:
        self._facts, self._ranks, self._times = facts, window.ranks, window.times
        self._usual: Seconds = np.median(self._times, axis=0)
        self._step_s = float(np.median(self._times.sum(axis=2).mean(axis=1)))
        self._own: Seconds = self._times[..., _OWN].sum(axis=2)
        passes = [[_FORWARD], [_BACKWARD]] if facts.is_on_host else [[_FORWARD, _BACKWARD]]
        self._phases = [[_BETWEEN], [_LOADING], *passes]
        number = facts.loader_workers + 1
        self._read_ahead = f"read ahead with a DataLoader with `num_workers={number}`"
        # As plan/shards.py divides them: the first workers have one more if there is a remainder.
        size, num_longer = divmod(max(facts.shards, len(self._ranks)), len(self._ranks))
        self._shards: Seconds = np.full(len(self._ranks), float(size))
        self._shards[:num_longer] += 1

    def findings(self) -> Iterator[Slowdown]:
        """Yield what costs time."""
        yield from self._common()
        if len(self._ranks) < 2:
            return
        yield from self._uneven()
        yield from self._slow_worker()

    def _common(self) -> Iterator[Slowdown]:
        """Yield what takes long on all workers."""
        look = "check callbacks, and what the program does between steps"
        for column, costs, cause, what, remedy in (
            (_LOADING, _LOADING_COSTS, SlowdownCause.LOADING, "loading", self._read_ahead),
            (_BETWEEN, _BETWEEN_COSTS, SlowdownCause.BETWEEN, "what lies between steps", look),
        ):
            least_s = float(self._usual[:, column].min())
            if least_s >= max(costs * self._step_s, _WORTH_S):
                sentence = f"{what} takes {duration(least_s)} of a step's {duration(self._step_s)}"
                yield Slowdown(cause, least_s / self._step_s, sentence, remedy)

    def _slow_worker(self) -> Iterator[Slowdown]:
        compared = [self._compared(at) for at in range(len(self._ranks))]
        at = max(range(len(compared)), key=lambda index: compared[index].excess_s)
        one = compared[at]
        is_longer = one.excess_s >= max(SLOW_BY * float(one.expected.sum()), _FLOOR_S)
        if is_longer and one.is_sure:
            columns = [column for p in one.longest for column in self._phases[p]]
            than = "is usual for its shards" if self._are_uneven else "the others"
            sentence = (
                f"worker {self._ranks[at]} is slow in {_phases_in_words(columns)}: "
                f"{duration(one.own_s)} a step, {duration(one.excess_s)} more than {than}"
            )
            cost = self._lost_s(at, one.excess_s) / self._step_s
            remedy = self._remedy(columns[0])
            yield Slowdown(SlowdownCause.WORKER, cost, sentence, remedy, self._ranks[at])

    def _uneven(self) -> Iterator[Slowdown]:
        if not self._are_uneven:
            return
        heavy = self._shards == self._shards.max()
        passes = self._usual[:, _BY_SHARE].sum(axis=1) / self._shards
        by_share_s = float(np.median(passes) * (self._shards.max() - self._shards.mean()))
        seen_s = float(np.median(self._own[:, heavy].mean(axis=1) - self._own.mean(axis=1)))
        shards, num_workers = int(self._shards.sum()), len(self._ranks)
        sentence = f"{shards} shards do not divide evenly among {num_workers} workers"
        fitting = -(-shards // num_workers) * num_workers
        remedy = f"`shards={fitting}` divides evenly, with other bits"
        cost = min(by_share_s, seen_s) / self._step_s
        yield Slowdown(SlowdownCause.UNEVEN, cost, sentence, remedy)

    def _compared(self, at: int) -> _Compared:
        """Compare a worker with the others within each step, so that what all share cancels."""
        times = np.stack(
            [self._times[..., columns].sum(axis=2) for columns in self._phases], axis=2
        )
        shares = np.ones((len(self._ranks), len(self._phases)))
        shares[:, 1:] = self._shards[:, None]
        others = np.median(np.delete(times / shares, at, axis=1), axis=1) * shares[at]
        usual, own = np.median(others, axis=0), np.median(times[:, at], axis=0)
        is_telling = usual >= _TELLING_S
        core = _middle(own[is_telling] / usual[is_telling])
        return _Compared(core * usual, times[:, at] - core * others)

    def _lost_s(self, at: int, excess_s: float) -> float:
        """Return how much shorter steps would be if a worker were not slower by `excess_s`."""
        lead = self._own[:, at] - np.delete(self._own, at, axis=1).max(axis=1)
        return float(np.median(np.clip(lead, 0.0, excess_s)))

    @property
    def _are_uneven(self) -> bool:
        return bool(self._shards.max() > self._shards.min())

    def _remedy(self, column: int) -> str:
        if column == _LOADING:
            return f"{self._read_ahead}, or check where its samples are stored"
        if column == _BETWEEN:
            return "check callbacks, and code that runs only on this worker between steps"
        where = (
            "what else its process does" if self._facts.is_on_host else "what runs on its device"
        )
        return f"check whether its samples take longer to compute, and {where}"


@dataclass(frozen=True, slots=True)
class _Compared:
    """What one worker takes compared with the others."""

    expected: Seconds  # seconds that its share takes on its core, of shape (phases,)
    by_step: Seconds  # seconds that it takes longer than that, of shape (steps, phases)

    @property
    def longest(self) -> list[int]:
        """The phases with the longest excess, the longest first."""
        usual = np.median(self.by_step, axis=0)
        return [int(p) for p in np.argsort(-usual) if usual[p] >= _NAMED * usual.max()]

    @property
    def excess_s(self) -> float:
        """The seconds of a step by which those phases are longer than expected."""
        return float(np.median(self.by_step, axis=0)[self.longest].sum())

    @property
    def is_sure(self) -> bool:
        """Whether they are longer in nearly all steps, and by more than chance explains."""
        in_all = self.by_step[:, self.longest].sum(axis=1)
        deviation = float(np.median(np.abs(in_all - np.median(in_all))))
        error_s = _OF_MEDIAN * deviation / math.sqrt(len(in_all))
        is_usual = float((in_all > 0).mean()) >= _NEARLY_ALL
        return is_usual and self.excess_s >= _ERRORS * error_s

    @property
    def own_s(self) -> float:
        """The seconds of a step that they take."""
        return float(self.expected[self.longest].sum()) + self.excess_s


def _delayed_more(delayed: Mapping[int, float], rank: int) -> float:
    """Return the excess of a worker's wait for a core over the shortest wait of the others.

    The phase of that wait is unknown, so it may be what the worker takes longer.
    """
    others = [part for other, part in delayed.items() if other != rank]
    return max(delayed.get(rank, 0.0) - min(others, default=0.0), 0.0)


def _middle(ratios: Seconds) -> float:
    """Return the median; if several values qualify, the one nearest 1: cores explain little."""
    num = len(ratios)
    if num < 2:
        return 1.0
    ascending = np.sort(ratios)
    return float(np.clip(1.0, ascending[(num - 1) // 2], ascending[num // 2]))


def _phases_in_words(columns: list[int]) -> str:
    words = {
        _LOADING: "loading its samples",
        _FORWARD: "its forward pass",
        _BACKWARD: "its backward pass",
        _BETWEEN: "what it does between steps",
    }
    if set(columns) == {_FORWARD, _BACKWARD}:
        return "its passes"
    return " and ".join(words[column] for column in columns)

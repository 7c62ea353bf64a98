"""What makes steps slower than they could be? Decided from the times of a window of steps.

Each worker does its own part of a step, then waits for whoever comes last::

    worker 0   between │ loading │ forward │ backward │ ..waiting.. │ sum, update
    worker 1   between │ loading │ forward ────────────│ backward   │ sum, update
                                           └ excess: longer than is usual for its share

A worker is called slow if it comes last in nearly all steps, by more than workers differ anyhow,
and neither its shards nor waiting for a free core explain that. Medians decide, so what happens in
a few steps accuses nobody. Nothing here reads a clock or a file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unisono.train.slowdown import COSTS, Slowdown, SlowdownCause, milliseconds
from unisono.train.step_window import COLUMNS, Seconds, StepWindow, median_of

_BETWEEN, _LOADING, _FORWARD, _BACKWARD, _WAITING, _SUMMING, _UPDATING, _DELAYED = range(8)
_BEFORE_SUM = [_BETWEEN, _LOADING, _FORWARD, _BACKWARD]
_BY_SHARE = [_LOADING, _FORWARD, _BACKWARD]
_WALL = slice(_BETWEEN, _DELAYED)

LAST_IN = 0.75  # of the steps, at least, whoever is slow comes last
SLOW_BY = 0.08  # of what is usual
_FLOOR_S = 5e-5  # what one worker does for all, as leader, takes less
_PART_OF_EXCESS = 0.3  # a phase with so much of it is named
_KNOWN_AT_LEAST = 8  # steps whose delays are known
_SMALL_S, _SMALL_SHARE = 0.02, 0.3


def judge(window: StepWindow) -> tuple[Slowdown, ...]:
    """Find what costs time in a window of steps, the costliest first."""
    if not window.times.size:
        return ()
    found = list(_Judgement(window).findings())
    return tuple(sorted(found, key=lambda one: -one.of_step))


class _Judgement:
    """What follows from one window. Final."""

    def __init__(self, window: StepWindow) -> None:
        self._window, self._times = window, window.times_without_pauses
        self._delays = np.nan_to_num(self._times[..., _DELAYED])
        # Of the calmest steps, a quarter of them at least: what a phase takes undisturbed.
        delayed = self._delays.sum(axis=1)
        calm = self._times[delayed <= np.sort(delayed)[len(delayed) // 4]]
        self._usual: Seconds = median_of(calm)
        self._step_s = float(median_of(self._times[..., _WALL].sum(axis=2).mean(axis=1)))
        self._before_sum: Seconds = self._times[..., _BEFORE_SUM].sum(axis=2)
        own = np.maximum(self._before_sum - self._delays, 0.0)
        self._undelayed: Seconds = own
        self._work: Seconds = own
        self._phases = list(_BEFORE_SUM)
        if window.updater is None:
            self._phases += [_SUMMING, _UPDATING]
            self._work = own + self._times[..., [_SUMMING, _UPDATING]].sum(axis=2)
        self._weights = window.weights

    def findings(self) -> Iterator[Slowdown]:
        """Give what costs time."""
        if len(self._window.ranks) < 2:
            yield from self._small()
            return
        busy = list(self._busy())
        known = [*self._uneven(), *self._slow_worker(), *busy]
        yield from known
        yield from self._whole_update()
        if not known:
            yield from self._alike()
        if not busy:  # then meetings take long for that
            yield from self._small()

    def _slow_worker(self) -> Iterator[Slowdown]:
        window, work = self._window, self._work
        last = np.bincount(work.argmax(axis=1), minlength=len(window.ranks))
        at = int(last.argmax())
        if last[at] < LAST_IN * len(work) or self._is_blind:
            return
        lead_s = float(median_of(work[:, at] - np.delete(work, at, axis=1).max(axis=1)))
        expected = self._expected(at)
        excess = {p: float(self._usual[at, p] - expected[p]) for p in self._phases}
        excess_s = min(lead_s, sum(excess.values()))
        usual_s = sum(float(expected[p]) for p in self._phases)
        if excess_s < max((SLOW_BY + self._stolen) * usual_s, _FLOOR_S):
            return
        order = sorted(excess, key=lambda p: -excess[p])
        named = [p for p in order if excess[p] >= _PART_OF_EXCESS * sum(excess.values())]
        if not window.is_on_host and named and named[0] in (_FORWARD, _BACKWARD):
            named = [_FORWARD, _BACKWARD]
        named = named or order[:1]
        rank, phases = window.ranks[at], tuple(COLUMNS[p] for p in named)
        own_s = sum(float(self._usual[at, p]) for p in named)
        than = "is usual for its shards" if self._are_uneven else "the others"
        sentence = (
            f"worker {rank} is slow in {_told_phases(phases)}: {milliseconds(own_s)} a step, "
            f"{milliseconds(excess_s)} more than {than}"
        )
        remedy = _remedy(phases[0], window)
        yield self._finding(
            SlowdownCause.WORKER, excess_s, sentence, remedy, rank=rank, phases=phases
        )

    def _uneven(self) -> Iterator[Slowdown]:
        window, weights = self._window, self._weights
        if not self._are_uneven:
            return
        heavy = weights >= weights.max() * (1 - 1e-9)
        passes = self._usual[:, _BY_SHARE].sum(axis=1)
        by_weight = float(median_of(passes / weights)) * float(weights.max() - weights.mean())
        work = self._undelayed
        seen = float(median_of(work[:, heavy].mean(axis=1) - work.mean(axis=1)))
        excess_s = min(by_weight, seen)
        if excess_s < COSTS * self._step_s:
            return
        yield self._finding(*_told_division(window, excess_s))

    def _busy(self) -> Iterator[Slowdown]:
        is_known = ~np.isnan(self._times[..., _DELAYED]).any(axis=1)
        if is_known.sum() < _KNOWN_AT_LEAST:
            return
        with_delays = self._before_sum[is_known].max(axis=1)
        excess_s = float((with_delays - self._undelayed[is_known].max(axis=1)).mean())
        step_s = float(self._times[is_known][..., _WALL].sum(axis=2).mean())
        if excess_s < COSTS * step_s:
            return
        machine = self._window.machine
        why = "" if machine is None else f" ({machine.in_words})"
        yield Slowdown(
            SlowdownCause.BUSY,
            excess_s,
            excess_s / step_s,
            excess_s / step_s,
            f"workers wait {milliseconds(excess_s)} a step for a free core{why}",
            "start fewer workers or loader processes, or stop what else runs there",
        )

    def _whole_update(self) -> Iterator[Slowdown]:
        window = self._window
        if window.updater not in window.ranks:
            return
        at = window.ranks.index(window.updater)
        excess_s = float(self._usual[at, _UPDATING]) * (1 - 1 / len(window.ranks))
        if excess_s < COSTS * self._step_s:
            return
        sentence = (
            f"worker {window.updater} alone updates the parameters while the others wait "
            f"({milliseconds(float(self._usual[at, _UPDATING]))} a step)"
        )
        remedy = (
            "an element-wise optimizer without hooks, such as `torch.optim.AdamW`, is shared among "
            "the workers"
        )
        yield self._finding(SlowdownCause.WHOLE_UPDATE, excess_s, sentence, remedy)

    def _alike(self) -> Iterator[Slowdown]:
        waiting = self._times[..., _WAITING].mean(axis=0)
        step_s = float(self._times[..., _WALL].sum(axis=2).mean())
        excess_s = float(waiting.mean())
        if excess_s < COSTS * step_s:
            return
        sentence = (
            f"no worker is slow, but each waits about {milliseconds(excess_s)} of a step's "
            f"{milliseconds(step_s)}, as now one comes last, now another"
        )
        share = excess_s / step_s
        yield Slowdown(SlowdownCause.ALIKE, excess_s, share, share, sentence, self._even_batch())

    def _even_batch(self) -> str:
        """Say which batch would give each shard as many samples, if that matters."""
        batch_size, num_shards = self._window.batch_size, sum(self._window.shards)
        fitting = -(-batch_size // num_shards) * num_shards
        if fitting - batch_size < COSTS * fitting:
            return ""
        return f"`batch_size={fitting}` gives every shard as many samples, with other results"

    def _small(self) -> Iterator[Slowdown]:
        passes_s = float(median_of(self._usual[:, _BY_SHARE].sum(axis=1)))
        fixed = [_BETWEEN, _SUMMING, _UPDATING]
        waiting_s = float(self._usual[:, _WAITING].min())
        excess_s = float(median_of(self._usual[:, fixed].sum(axis=1))) + waiting_s
        if self._step_s >= _SMALL_S or excess_s < _SMALL_SHARE * (passes_s + excess_s):
            return
        sentence = (
            f"batches are small: what comes with every step (meetings, sum, update) takes "
            f"{milliseconds(excess_s)} beside {milliseconds(passes_s)} of loading and passes"
        )
        remedy = "a larger `batch_size` has fewer steps, with other results"
        yield self._finding(SlowdownCause.SMALL, excess_s, sentence, remedy)

    def _expected(self, at: int) -> Seconds:
        """Give the time of each column that the other workers make one expect of a worker."""
        others = np.delete(self._usual, at, axis=0)
        expected: Seconds = median_of(others)
        if self._are_uneven:
            weights = np.delete(self._weights, at)[:, None]
            a_unit = median_of(others[:, _BY_SHARE] / weights)
            expected[_BY_SHARE] = a_unit * self._weights[at]
        return expected

    @property
    def _are_uneven(self) -> bool:
        return bool(self._weights.max() > self._weights.min() * (1 + 1e-9))

    @property
    def _is_blind(self) -> bool:
        """Whether a worker may wait for cores where nobody sees it."""
        machine = self._window.machine
        is_unseen = self._window.has_threads or bool(np.isnan(self._times[..., _DELAYED]).all())
        return is_unseen and machine is not None and machine.is_crowded

    @property
    def _stolen(self) -> float:
        """What a hypervisor may have taken from one worker more than from another."""
        machine = self._window.machine
        return 0.0 if machine is None else 2 * machine.stolen

    def _finding(
        self,
        cause: SlowdownCause,
        excess_s: float,
        sentence: str,
        remedy: str,
        *,
        rank: int | None = None,
        phases: tuple[str, ...] = (),
    ) -> Slowdown:
        share = excess_s / self._step_s if self._step_s > 0 else 0.0
        return Slowdown(cause, excess_s, share, share, sentence, remedy, rank, phases)


def _told_division(window: StepWindow, excess_s: float) -> tuple[SlowdownCause, float, str, str]:
    """Say how the shards are divided, and what to do about it."""
    counts = ", ".join(map(str, window.shards))
    num_workers = len(window.ranks)
    if window.speeds:
        sentence = (
            f"the devices differ in speed, and {sum(window.shards)} shards cannot be divided more "
            f"evenly than {counts}"
        )
        return SlowdownCause.DEVICES, excess_s, sentence, "more `shards` divide more evenly"
    fitting = -(-sum(window.shards) // num_workers) * num_workers
    sentence = (
        f"{sum(window.shards)} shards do not divide evenly among {num_workers} workers ({counts})"
    )
    return (
        SlowdownCause.UNEVEN,
        excess_s,
        sentence,
        f"`shards={fitting}` divides evenly, with other bits",
    )


def _told_phases(phases: tuple[str, ...]) -> str:
    words = {
        "loading": "loading its samples",
        "forward": "its forward pass",
        "backward": "its backward pass",
        "between": "what it does between steps",
        "summing": "its part of the sum",
        "updating": "its part of the update",
    }
    if set(phases) == {"forward", "backward"}:
        return "its passes"
    return " and ".join(words[phase] for phase in phases)


def _remedy(phase: str, window: StepWindow) -> str:
    """Say what to look at."""
    if phase == "loading":
        more = window.loader_workers + 1
        return f"read ahead with `loader_workers={more}`, or look at where its samples lie"
    if phase == "between":
        return "look at callbacks, and at code that runs on this worker alone between steps"
    where = "core" if window.is_on_host else "device"
    return f"look at what else runs on its {where}, and whether its samples take longer to compute"

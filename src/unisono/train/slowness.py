"""What makes steps slower than they could be? Decided from the times of a window of steps.

Each worker does its own part of a step, then waits for whoever comes last::

    worker 0   between │ loading │ forward │ backward │ ..waiting.. │ sum, update
    worker 1   between │ loading │ forward ────────────│ backward   │ sum, update
                                           └ excess: longer than is usual for its share

A worker is called slow if some of its phases take longer in nearly all steps, by more than workers
differ anyhow, and neither its shards nor its core nor waiting for a free one explain that. Medians
decide, so what happens in a few steps accuses nobody. Nothing here reads a clock or a file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unisono.train.phase_excess import NEARLY_ALL, PhaseExcess, excess_of
from unisono.train.slowdown import COSTS, Slowdown, SlowdownCause, milliseconds
from unisono.train.step_window import COLUMNS, Seconds, StepWindow, median_of

_BETWEEN, _LOADING, _FORWARD, _BACKWARD, _WAITING, _SUMMING, _UPDATING, _DELAYED = range(8)
_BEFORE_SUM = [_BETWEEN, _LOADING, _FORWARD, _BACKWARD]
_BY_SHARE = [_LOADING, _FORWARD, _BACKWARD]
_WALL = slice(_BETWEEN, _DELAYED)

SLOW_BY = 0.08  # of what is usual
_FLOOR_S = 5e-5  # what one worker does for all, as leader, takes less
_KNOWN_AT_LEAST = 8  # steps whose delays are known
_SMALL_S, _SMALL_SHARE = 0.02, 0.3


def judge(window: StepWindow) -> tuple[Slowdown, ...]:
    """Find what costs time in a window of steps, the costliest first."""
    if not window.times.size:
        return ()
    return tuple(sorted(_Judgement(window).findings(), key=lambda one: -one.of_step))


class _Judgement:
    """What follows from one window. Final."""

    def __init__(self, window: StepWindow) -> None:
        self._window, self._times = window, window.times_without_pauses
        self._delays = np.nan_to_num(self._times[..., _DELAYED])
        # Of the calmest steps, a quarter of them at least: what a phase takes undisturbed.
        delayed = self._delays.sum(axis=1)
        is_calm = delayed <= np.sort(delayed)[len(delayed) // 4]
        self._calm, self._calm_delays = self._times[is_calm], self._delays[is_calm]
        self._usual: Seconds = median_of(self._calm)
        self._step_s = float(median_of(self._times[..., _WALL].sum(axis=2).mean(axis=1)))
        self._before_sum: Seconds = self._times[..., _BEFORE_SUM].sum(axis=2)
        self._undelayed: Seconds = np.maximum(self._before_sum - self._delays, 0.0)
        self._work: Seconds = self._undelayed
        passes = [[_FORWARD], [_BACKWARD]] if window.is_on_host else [[_FORWARD, _BACKWARD]]
        self._phases = [[_BETWEEN], [_LOADING], *passes]
        if window.updater is None:
            self._phases += [[_SUMMING], [_UPDATING]]
            self._work = self._undelayed + self._times[..., [_SUMMING, _UPDATING]].sum(axis=2)
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
        window = self._window
        if self._is_blind:
            return
        compared = [self._compared(at) for at in range(len(window.ranks))]
        # Nobody knows in which phase a worker waited for a core.
        excess = [one.excess_s for one in compared] - median_of(self._calm_delays)
        at = int(excess.argmax())
        one, excess_s = compared[at], float(excess[at])
        if excess_s < self._least_s(float(one.expected.sum())):
            yield from self._slow_core([one.core for one in compared])
        elif one.is_sure:
            phases = tuple(COLUMNS[column] for p in one.longest for column in self._phases[p])
            than = "is usual for its shards" if self._are_uneven else "the others"
            sentence = (
                f"{self._who(at)} is slow in {_told_phases(phases)}: {milliseconds(one.own_s)} a "
                f"step, {milliseconds(excess_s)} more than {than}"
            )
            cause, remedy = SlowdownCause.WORKER, _remedy(phases[0], window)
            yield self._finding(cause, excess_s, sentence, remedy, at=at, phases=phases)

    def _slow_core(self, factors: list[float]) -> Iterator[Slowdown]:
        at = int(np.argmax(factors))
        work_s = float(median_of(self._work[:, at]))
        excess_s = work_s * (1 - 1 / factors[at])
        is_last = (self._work.argmax(axis=1) == at).mean() >= NEARLY_ALL
        if not is_last or excess_s < self._least_s(work_s - excess_s):
            return
        where = "core" if self._window.is_on_host else "core or device"
        sentence = (
            f"everything takes {self._who(at)} {factors[at]:.2f} times as long as the others, "
            f"{milliseconds(excess_s)} more a step: it has a slower {where}"
        )
        remedy = f"look at what else runs on its {where}; virtual cores may share a real one"
        yield self._finding(SlowdownCause.CORE, excess_s, sentence, remedy, at=at)

    def _who(self, at: int) -> str:
        hosts = self._window.hosts
        return f"worker {self._window.ranks[at]}" + (f" (host {hosts[at]})" if hosts else "")

    def _uneven(self) -> Iterator[Slowdown]:
        window, weights = self._window, self._weights
        if not self._are_uneven:
            return
        heavy = weights >= weights.max() * (1 - 1e-9)
        passes = self._usual[:, _BY_SHARE].sum(axis=1)
        by_weight = float(median_of(passes / weights) * (weights.max() - weights.mean()))
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
        sentence = f"workers wait {milliseconds(excess_s)} a step for a free core{why}"
        remedy = "start fewer workers or loader processes, or stop what else runs there"
        yield self._finding(SlowdownCause.BUSY, excess_s, sentence, remedy, step_s=step_s)

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
        step_s = float(self._times[..., _WALL].sum(axis=2).mean())
        excess_s = float(self._times[..., _WAITING].mean())
        if excess_s < COSTS * step_s:
            return
        sentence = (
            f"no worker is slow, but each waits about {milliseconds(excess_s)} of a step's "
            f"{milliseconds(step_s)}, as now one comes last, now another"
        )
        remedy = self._even_batch()
        yield self._finding(SlowdownCause.ALIKE, excess_s, sentence, remedy, step_s=step_s)

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

    def _compared(self, at: int) -> PhaseExcess:
        """Compare a worker with the others, in the calm steps."""
        phases = [self._calm[..., columns].sum(axis=2) for columns in self._phases]
        shares = np.ones((len(self._weights), len(phases)))
        for p, columns in enumerate(self._phases):
            if columns[0] in _BY_SHARE:
                shares[:, p] = self._weights
        return excess_of(np.stack(phases, axis=2), shares, at)

    def _lost_s(self, at: int, excess_s: float) -> float:
        """Give what the steps would be shorter by, were one worker not slow by so much."""
        lead = self._work[:, at] - np.delete(self._work, at, axis=1).max(axis=1)
        return float(median_of(np.clip(lead, 0.0, excess_s)))

    def _least_s(self, usual_s: float) -> float:
        """Give what is more than workers differ anyhow."""
        return max((SLOW_BY + self._stolen) * usual_s, _FLOOR_S)

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
        at: int | None = None,
        phases: tuple[str, ...] = (),
        step_s: float | None = None,
    ) -> Slowdown:
        lost_s = excess_s if at is None else self._lost_s(at, excess_s)
        step_s = self._step_s if step_s is None else step_s
        share = lost_s / step_s if step_s > 0 else 0.0
        rank = None if at is None else self._window.ranks[at]
        return Slowdown(cause, excess_s, lost_s, share, share, sentence, remedy, rank, phases)


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
        option = f"loader_workers={window.loader_workers + 1}"
        return f"read ahead with `{option}`, or look at where its samples lie"
    if phase == "between":
        return "look at callbacks, and at code that runs on this worker alone between steps"
    if window.is_on_host:
        return (
            "look at whether its samples take longer to compute, and at what else its process does"
        )
    return "look at what else runs on its device, and whether its samples take longer to compute"

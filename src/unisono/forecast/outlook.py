"""What is to be expected of each number of workers: time, speed-up, and what limits it.

Failures: a run of N workers loses one N / mtbf times an hour, and with it `lost_s`. With a share
N · lost_s / mtbf of its time lost, it takes 1 / (1 − share) times as long; if that is 1, for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from unisono.forecast.cluster import Cluster, sent_bytes
from unisono.forecast.simulation import CAUSES, IDEAL, SimulatedStep, simulate
from unisono.forecast.step_profile import StepProfile, TimedSteps
from unisono.forecast.workload import Workload, divide_work

FAILURES = "failures"
_NO_LIMIT = 0.05  # of the time: what costs less limits nothing
_RESAMPLED = 40
_BLOCKS = 8
_BAND = (5.0, 95.0)


@dataclass(frozen=True, slots=True)
class Failures:
    """How often workers are lost, and what that costs."""

    mtbf_s: float = math.inf  # mean time between failures of one worker; infinite: there are none
    recovery_s: float = 0.0  # until the run goes on as before, on one host
    restart_s: float = 0.0  # until it does on several hosts, which start again
    checkpoint_s: float = 0.0  # between two checkpoints, of which several hosts lose half

    def lost_s(self, num_hosts: int) -> float:
        """Give what one failure costs."""
        return self.recovery_s if num_hosts == 1 else self.restart_s + self.checkpoint_s / 2

    def lost_share(self, num_workers: int, num_hosts: int) -> float:
        """Give the share of the time that is lost, at most 1."""
        return min(num_workers / self.mtbf_s * self.lost_s(num_hosts), 1.0)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of one number of workers."""

    workers: int  # this and the next three: see `Workload`
    hosts: int
    shards: int
    batch_size: int
    is_same_run: bool  # whether batch and shards, and so all bits, are those of the program here
    step_s: float  # of a step in the mean, failures left out
    # what resampled measurements give in 90 % of the cases; None: nothing measured
    step_band_s: tuple[float, float] | None
    samples_per_second: float  # with failures
    # with failures; None: nobody knows how many samples, or epochs, there are
    epoch_s: float | None
    total_s: float | None  # likewise
    speed_up: float  # of samples a second over those of one worker without failures
    speed_up_band: tuple[float, float] | None  # likewise
    efficiency: float  # that over the number of workers
    limited_by: str  # the cause that costs most; empty if none costs 5 %
    causes_s: dict[str, float]  # the ideal time of a step, and what each cause adds, in seconds
    host_bytes: float  # what each host sends the others in a step

    @property
    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON: what takes for ever is null."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, tuple):
                found[name] = list(value)
            elif isinstance(value, float) and not math.isfinite(value):
                found[name] = None
        return found


def expectations(
    profile: StepProfile,
    counts: Sequence[int],
    cluster: Cluster,
    failures: Failures,
    *,
    epochs: float | None = None,
    grows: bool = False,
) -> list[Expectation]:
    """Forecast each number of workers.

    Args:
        profile: what is known of steps.
        counts: numbers of workers.
        cluster: the hosts.
        failures: how often workers are lost.
        epochs: how many there are; None: not known.
        grows: see :func:`divide_work`.
    """
    works = [
        divide_work(profile, number, cluster.workers_on_hosts(number), grows=grows)
        for number in counts
    ]
    alone = divide_work(profile, 1, [1])
    again = list(_resampled(profile)) if profile.is_measured else []
    base = [simulate(one, alone, cluster).seconds for one in (profile, *again)]
    return [_expectation(profile, again, base, work, cluster, failures, epochs) for work in works]


def _expectation(
    profile: StepProfile,
    again: Sequence[StepProfile],
    base: Sequence[float],
    work: Workload,
    cluster: Cluster,
    failures: Failures,
    epochs: float | None,
) -> Expectation:
    step = simulate(profile, work, cluster)
    lost = failures.lost_share(work.num_workers, work.num_hosts)
    stretch = 1 / (1 - lost) if lost < 1 else math.inf
    seconds = [step.seconds, *(simulate(one, work, cluster).seconds for one in again)]
    part = work.batch_size / profile.batch_size
    speed_ups = [part * one / (taken * stretch) for one, taken in zip(base, seconds, strict=True)]
    epoch_s = None
    if profile.num_samples is not None:
        epoch_s = _epoch_s(step, work, profile.num_samples) * stretch
    causes = {**step.causes_s, FAILURES: step.seconds * lost}
    return Expectation(
        work.num_workers,
        work.num_hosts,
        work.num_shards,
        work.batch_size,
        work.is_same_run,
        step.seconds,
        _band(seconds[1:]),
        work.batch_size / (step.seconds * stretch),
        epoch_s,
        None if epoch_s is None or epochs is None else epoch_s * epochs,
        speed_ups[0],
        _band(speed_ups[1:]),
        speed_ups[0] / work.num_workers,
        _limit(causes),
        causes,
        sent_bytes(sum(profile.gradient_bytes), work),
    )


def _epoch_s(step: SimulatedStep, work: Workload, num_samples: int) -> float:
    """Give an epoch's time, whose last step has the samples that are left."""
    num_whole, rest = divmod(num_samples, work.batch_size)
    if not rest:
        return num_whole * step.seconds
    return (num_whole + 1) * step.seconds - step.own_s * (1 - rest / work.batch_size)


def _limit(causes: dict[str, float]) -> str:
    """Name the cause that costs most."""
    cost, cause = max((cost, cause) for cause, cost in causes.items() if cause != IDEAL)
    return cause if cost > _NO_LIMIT * sum(causes.values()) else ""


def in_words(cause: str) -> str:
    """Say what a cause is."""
    return {**CAUSES, FAILURES: "failures", IDEAL: "ideal"}.get(cause, "")


def _band(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    low, high = np.percentile(np.array(values), _BAND)
    return float(low), float(high)


def _resampled(profile: StepProfile) -> Iterator[StepProfile]:
    """Draw the measurements anew: turns, and in each of them blocks of neighbouring steps."""
    generator = np.random.default_rng(0)
    for _ in range(_RESAMPLED):
        together = profile.together
        yield replace(
            profile,
            alone=_drawn_anew(profile.alone, generator),
            together=None if together is None else _drawn_anew(together, generator),
        )


def _drawn_anew(steps: TimedSteps, generator: np.random.Generator) -> TimedSteps:
    turns = np.unique(steps.turns)
    chosen = []
    for turn in generator.choice(turns, len(turns)):
        blocks = np.array_split(np.flatnonzero(steps.turns == turn), _BLOCKS)
        blocks = [block for block in blocks if len(block)]
        chosen += [blocks[at] for at in generator.integers(len(blocks), size=len(blocks))]
    return steps.some(np.concatenate(chosen))

"""What keeps N workers from being N times as fast as one?

A step of N workers ideally takes the N-th part of a step of one. What it takes beyond that is
taken apart into causes that add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.quantities import duration
from unisono.speedup.measured_steps import Measured, TimedSteps

_NO_LIMIT = 0.05  # of a step's time: what costs less limits nothing
CAUSES = {
    "shards": "they do not divide evenly, so some workers compute more",
    "contention": "workers slow each other: they share cores, memory bandwidth, caches, clock",
    "stragglers": "each step waits for its slowest worker",
    "exchange": "adding up, meetings, transfers, and what lies between steps",
    "update": "the optimizer, as far as workers do not divide it",
}
"""What makes a step longer than ideal, in words."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What so many workers reach."""

    num_workers: int  # N
    step_s: float  # of a step in the mean
    turns_differ: float  # by which part of it: much, if other programs use the machine
    samples_per_second: float
    epoch_s: float | None  # None: the data have no end
    speed_up: float  # over one worker
    efficiency: float  # that over the number of workers
    causes_s: dict[str, float]  # what each cause adds to the ideal time of a step

    @property
    def limit(self) -> str:
        """Say in a sentence what limits it."""
        if self.num_workers == 1:
            return "Limit: not known, as one worker alone was timed."
        ideal_s = self.step_s - sum(self.causes_s.values())
        took = (
            f"a step on {self.num_workers} workers takes {duration(self.step_s)}, ideally "
            f"{duration(ideal_s)}"
        )
        cost_s, cause = max((cost_s, cause) for cause, cost_s in self.causes_s.items())
        if cost_s <= _NO_LIMIT * self.step_s:
            return f"Limit: none found; {took}."
        return f"Limit: {cause} ({CAUSES[cause]}), {duration(cost_s)}; {took}."


def efficiencies(measured: Measured) -> list[Efficiency]:
    """Compare each number of workers with one."""
    found, alone = [], measured.steps[0]
    for steps in measured.steps:
        rate, speed_up = measured.batch_size / steps.step_s, alone.step_s / steps.step_s
        found.append(
            Efficiency(
                steps.num_workers,
                steps.step_s,
                max(steps.turns_s) / min(steps.turns_s) - 1,
                rate,
                None if measured.num_samples is None else measured.num_samples / rate,
                speed_up,
                speed_up / steps.num_workers,
                _causes(alone, steps, measured.num_shards),
            )
        )
    return found


def _causes(alone: TimedSteps, steps: TimedSteps, num_shards: int) -> dict[str, float]:
    number = steps.num_workers
    each, most = num_shards / number, most_shards(num_shards, number)
    shard_s, shard_s_alone = steps.own_s / each, alone.own_s / num_shards
    return {
        "shards": shard_s * (most - each),
        "contention": (shard_s - shard_s_alone) * each,
        "stragglers": steps.slowest_s - shard_s * most,
        "exchange": steps.exchange_s - alone.exchange_s / number,
        "update": steps.updating_s - alone.updating_s / number,
    }


def most_shards(num_shards: int, num_workers: int) -> int:
    """Count the shards of the worker that has the most."""
    return -(-num_shards // num_workers)

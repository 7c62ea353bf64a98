"""Profiles made up for tests."""

from __future__ import annotations

import numpy as np

from unisono.forecast.step_profile import StepProfile, TimedSteps


def timed(
    shards: tuple[int, ...],
    shard_s: float,
    *,
    steps: int = 64,
    spread: float = 0.0,
    summing_s: float = 0.0,
    updating_s: float = 0.0,
    rest_s: float = 0.0,
    seed: int = 1,
) -> TimedSteps:
    """Make steps whose shards take `shard_s`, and on each worker a bit more or less."""
    generator = np.random.default_rng(seed)
    factors = 1 + spread * generator.standard_normal((steps, len(shards)))
    return TimedSteps(
        shards,
        shard_s * factors * np.array(shards),
        np.full(steps, summing_s),
        np.full(steps, updating_s),
        np.full(steps, rest_s),
        np.arange(steps) % 2,
    )


def profile(
    alone: TimedSteps, together: TimedSteps | None = None, *, megabytes: float = 0.0
) -> StepProfile:
    """Make a profile of 10,000 samples, 8 of them in each shard of a step."""
    sizes = tuple([int(megabytes * 1e6 / 4)] * 4)
    shards = alone.shards[0]
    return StepProfile(
        alone, together, 8 * shards, 10_000, sizes, (1.0, 0.75, 0.5, 0.25), backward_share=0.5
    )

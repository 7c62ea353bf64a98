"""What is known of a program's steps: measured here, or given by the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from unisono.forecast.spread import Values

SHARED = "shared"
"""The exchange whose workers look at one copy of the parameters."""
_QUANTILES = 1000
MEASURED = ("own_s", "summing_s", "updating_s", "rest_s")
BY_STEP = (*MEASURED, "turns")
"""What :class:`TimedSteps` has an entry of for each step."""


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Steps of one number of workers."""

    shards: tuple[int, ...]  # how many each worker had
    # seconds until a worker was done with its shards: loading and passes; of shape (steps, workers)
    own_s: Values
    summing_s: Values  # in the mean of the workers; of shape (steps,)
    updating_s: Values  # likewise
    rest_s: Values  # what else a step took: meetings, transfers, what lies between steps
    turns: npt.NDArray[np.int64]  # in which of the measurements each step was; of shape (steps,)

    @property
    def num_workers(self) -> int:
        """How many workers there were."""
        return len(self.shards)

    @property
    def step_s(self) -> Values:
        """The seconds of each step, of shape (steps,)."""
        tail = self.summing_s + self.updating_s + self.rest_s
        total: Values = self.own_s.max(axis=1) + tail
        return total

    @property
    def shard_s(self) -> Values:
        """The seconds of a shard on each worker, of shape (steps, workers)."""
        per_shard: Values = self.own_s / np.array(self.shards, dtype=float)
        return per_shard

    def some(self, at: npt.NDArray[np.int64]) -> TimedSteps:
        """Give the steps at these places, which may repeat."""
        return replace(self, **{name: getattr(self, name)[at] for name in BY_STEP})


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a forecast is made of."""

    alone: TimedSteps  # steps of one worker
    together: TimedSteps | None  # steps of several workers of one host; None: not known
    batch_size: int  # samples of a step, on however many workers they were timed
    num_samples: int | None  # of an epoch; None: nobody knows
    gradient_bytes: tuple[int, ...]  # of each parameter, first to last
    ready: tuple[float, ...]  # when each has its gradient, as a part of a backward pass
    backward_share: float  # of the time of a shard, its backward pass
    loading_share: float = 0.0  # of a worker's time alone, reading samples
    delayed_share: float = 0.0  # of the several workers' time, waiting for a free core
    exchange: str = SHARED  # how gradients became one sum
    is_measured: bool = True  # False where the user has given the numbers

    @property
    def num_shards(self) -> int:
        """How many shards a step has."""
        return self.alone.shards[0]

    @property
    def several(self) -> TimedSteps:
        """The steps with the most workers."""
        return self.alone if self.together is None else self.together


def given_profile(
    step_s: float,
    batch_size: int,
    num_samples: int,
    *,
    spread: float = 0.0,
    gradient_bytes: Sequence[int] = (),
    backward_share: float = 2 / 3,
) -> StepProfile:
    """Make a profile of what is known of one device.

    Args:
        step_s: seconds for its batch.
        batch_size: samples of that batch.
        num_samples: of an epoch.
        spread: the standard deviation of that time, as a part of it.
        gradient_bytes: of all gradients, in pieces that become ready one after the other, the last
            first.
        backward_share: of the time, the backward pass.
    """
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    normal = np.array([NormalDist().inv_cdf(place) for place in places]) if spread else places * 0
    own_s = np.maximum(step_s * (1 + spread * normal), 0.0)
    nothing = np.zeros(_QUANTILES)
    number = len(gradient_bytes)
    return StepProfile(
        TimedSteps((1,), own_s[:, None], nothing, nothing, nothing, nothing.astype(np.int64)),
        None,
        batch_size,
        num_samples,
        tuple(gradient_bytes),
        tuple((number - at) / number for at in range(number)),
        backward_share,
        is_measured=False,
    )

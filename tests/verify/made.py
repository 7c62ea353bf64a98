"""Traces made by hand: two ranks with gradients of four elements, and one rank beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.tools.verify.trace import (
    Forward,
    Gradient,
    ModelState,
    Note,
    OptimizerStep,
    RankTrace,
    TwoRuns,
    Vector,
)

LOCAL = ((1.0, -2.0, 0.5, 3.0, 1.5), (0.5, 1.0, -1.5, 2.0, -4.0))
SAMPLES = (("a", "b"), ("c", "d"))


def mixed(weights: Sequence[float], vectors: Sequence[Vector] = LOCAL) -> Vector:
    """Return a weighted sum of local gradients."""
    return tuple(np.array(weights) @ np.array(vectors))


def ran(*records: object, rank: int = 0, how: str = "ended") -> RankTrace:
    """Make the trace of a rank whose program ended."""
    return RankTrace(rank, (*records, Note("end", how)))


ALONE = ran()  # one rank that did nothing


def gradient(final: Vector, *passes: Vector, clipped: Vector | None = None) -> Gradient:
    """Make a gradient."""
    return Gradient(final, passes, clipped, len(final))


def step(
    gradients: dict[str, Gradient],
    samples: Sequence[str] = (),
    *,
    number: int = 0,
    state: ModelState | None = None,
    **fields: Any,
) -> OptimizerStep:
    """Make a step of one pass."""
    return OptimizerStep(
        number=number,
        gradients=gradients,
        passes=(Forward(samples=tuple(samples)),),
        state=state or ModelState({"w": "start"}),
        **fields,
    )


def two_ranks(
    finals: Sequence[Vector],
    ones: Vector | None = None,
    *,
    samples: Sequence[Sequence[str]] = SAMPLES,
    **fields: Any,
) -> TwoRuns:
    """Make two ranks that take one step each, and one that takes it on all samples."""
    ranks = tuple(
        ran(step({"w": gradient(finals[rank], LOCAL[rank])}, samples[rank], **fields), rank=rank)
        for rank in range(2)
    )
    if ones is None:
        return TwoRuns(ranks, ALONE)
    everything = [sample for of_rank in samples for sample in of_rank]
    return TwoRuns(ranks, ran(step({"w": gradient(ones, ones)}, everything)))

"""Traces made by hand: two ranks with gradients of four elements, and one rank beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.tools.verify.trace import (
    Gradient,
    Micro,
    ModelState,
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


def gradient(final: Vector, *passes: Vector, clipped: Vector | None = None) -> Gradient:
    """Make a gradient."""
    return Gradient(final, passes, clipped, len(final))


def step(
    gradients: dict[str, Gradient],
    samples: Sequence[str] = (),
    *,
    number: int = 0,
    state: ModelState | None = None,
    **fields: object,
) -> OptimizerStep:
    """Make a step of one pass."""
    return OptimizerStep(
        number=number,
        gradients=gradients,
        micros=(Micro(tuple(samples)),),
        state=state or ModelState({"w": "start"}),
        **fields,  # type: ignore[arg-type]
    )


def two_ranks(
    finals: Sequence[Vector],
    ones: Vector | None = None,
    *,
    samples: Sequence[Sequence[str]] = SAMPLES,
    **fields: object,
) -> TwoRuns:
    """Make two ranks that take one step each, and one that takes it on all samples."""
    ranks = tuple(
        RankTrace(
            rank,
            (
                step(
                    {"w": gradient(finals[rank], LOCAL[rank])},
                    samples[rank],
                    **fields,  # type: ignore[arg-type]
                ),
            ),
        )
        for rank in range(2)
    )
    one = RankTrace()
    if ones is not None:
        everything = [sample for of_rank in samples for sample in of_rank]
        one = RankTrace(0, (step({"w": gradient(ones, ones)}, everything),))
    return TwoRuns(ranks, one)

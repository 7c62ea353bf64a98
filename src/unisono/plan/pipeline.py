"""In which order do the stages of a model compute their passes? One forward, one backward.

A model cut into stages computes a shard's forward pass from the first stage to the last, and its
backward pass back. While one stage computes a shard, the others can compute other shards: each
stage begins with as many forward passes as there are stages behind it, then takes turns::

    3 shards, 2 stages                      at most 1 shard in flight

    stage 0   F0 F1 ── B0 F2 B1 ── B2       F0 ── ── B0 F1 ── ── B1 …
    stage 1   ── F0 B0 F1 B1 F2 B2 ──       ── F0 B0 ── ── F1 B1 ── …

Forward passes, as backward passes, stay in the order of the shards on every stage, so nothing is
added up in another order than without stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagePass:
    """One stage's forward or backward pass of the shard at position `index` among a worker's."""

    index: int
    is_backward: bool


def limit_of(stage: int, num_stages: int, in_flight: int | None = None) -> int:
    """Give how many shards a stage may have begun and not yet differentiated.

    Args:
        stage: which one, counted from 0.
        num_stages: how many there are.
        in_flight: how many the first one may have; None: as many as there are stages, which is
            enough to keep all of them busy.

    Raises:
        ValueError: none may be.
    """
    if in_flight is not None and in_flight < 1:
        raise ValueError(f"`shards_in_flight` must be at least 1, but is {in_flight}.")
    at_most = num_stages if in_flight is None else min(in_flight, num_stages)
    return max(1, at_most - stage)


def num_due(num_open: int, limit: int, *, is_last: bool) -> int:
    """Say how many shards a stage differentiates behind a forward pass, the oldest first.

    Args:
        num_open: how many it has begun and not differentiated, with that one.
        limit: see :func:`limit_of`.
        is_last: whether it was the last forward pass of the step.
    """
    return num_open if is_last else max(0, num_open + 1 - limit)


def passes_of(
    stage: int, num_shards: int, num_stages: int, in_flight: int | None = None
) -> list[StagePass]:
    """List all passes of a stage in a step, in their order; arguments as of :func:`limit_of`."""
    limit = limit_of(stage, num_stages, in_flight)
    passes: list[StagePass] = []
    num_open = 0
    for index in range(num_shards):
        passes.append(StagePass(index, is_backward=False))
        num_open += 1
        for _ in range(num_due(num_open, limit, is_last=index == num_shards - 1)):
            passes.append(StagePass(index + 1 - num_open, is_backward=True))
            num_open -= 1
    return passes


def expected_bubble(num_shards: int, num_stages: int, in_flight: int | None = None) -> float:
    """Give the part of a step's passes in which stages have nothing to do, if all are equal.

    With enough shards in flight it is (stages − 1) / (shards + stages − 1). A backward pass counts
    as two forward passes.
    """
    passes = [passes_of(stage, num_shards, num_stages, in_flight) for stage in range(num_stages)]
    length, _ = length_of_passes(passes, {False: 1.0, True: 2.0})
    return 1 - 3 * num_shards / length


def length_of_passes(
    passes: Sequence[Sequence[StagePass]], seconds: Mapping[bool, float]
) -> tuple[float, list[int]]:
    """Work out how long a step's passes take if nothing else takes time.

    Args:
        passes: of each stage, in order.
        seconds: of a backward pass (True) and of a forward pass (False).

    Returns:
        The time until all are done, and for each stage the most shards that it had in flight.

    Raises:
        ValueError: the stages would wait for each other for ever.
    """
    done: dict[tuple[int, StagePass], float] = {}
    free, at = [0.0] * len(passes), [0] * len(passes)
    most, open_shards = [0] * len(passes), [0] * len(passes)
    while any(at[stage] < len(own) for stage, own in enumerate(passes)):
        has_moved = False
        for stage, own in enumerate(passes):
            while at[stage] < len(own):
                now = own[at[stage]]
                needed = _needed(stage, now, len(passes))
                if any(one not in done for one in needed):
                    break
                start = max([free[stage], *(done[one] for one in needed)])
                free[stage] = done[stage, now] = start + seconds[now.is_backward]
                open_shards[stage] += -1 if now.is_backward else 1
                most[stage] = max(most[stage], open_shards[stage])
                at[stage] += 1
                has_moved = True
        if not has_moved:
            raise ValueError("each stage waits for another one")
    return max(free), most


def _needed(stage: int, now: StagePass, num_stages: int) -> list[tuple[int, StagePass]]:
    """List the passes that have to be done before one is."""
    forward = StagePass(now.index, is_backward=False)
    if now.is_backward:
        later = [(stage + 1, now)] if stage + 1 < num_stages else []
        return [(stage, forward), *later]
    return [(stage - 1, now)] if stage else []

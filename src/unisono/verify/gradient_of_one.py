"""How is the gradient that all ranks have related to that of one rank on the same samples?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.verify.linear import Array, joined, passes_joined, relation, tolerance, weights
from unisono.verify.rank_trace import OptimizerStep, TwoRuns

_ENOUGH_COSINE, _ENOUGH_FACTOR = 0.95, 0.15


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """What one step shows; empty where nothing can be said."""

    check: str = ""  # the mistake
    evidence: str = ""  # what was seen
    is_synced: bool = False  # all ranks have the same gradient
    is_equal: bool = False  # it is that of one rank
    averages_parameters: bool = False  # these are averaged instead
    why_unknown: str = ""  # why it could not be compared


def tolerance_of(step: Sequence[OptimizerStep], names: Sequence[str]) -> float:
    """Return how far gradients of a step may be apart by rounding."""
    size = sum(step[0].gradients[name].size for name in names)
    dtype = "float32" if step[0].state is None else step[0].state.dtype
    return tolerance(dtype, size, step[0].number)


def compare_with_one(
    seen: TwoRuns, step: Sequence[OptimizerStep], names: Sequence[str]
) -> JudgedStep:
    """Compare the gradient that all ranks have with that of one rank.

    Args:
        seen: both runs.
        step: of all ranks.
        names: of the parameters that all ranks have a gradient of.
    """
    one = seen.step_of_one(step[0])
    number, evidence = step[0].number, f"Step {step[0].number}: all ranks have the same gradient."
    synced = JudgedStep(evidence=evidence, is_synced=True)
    names = [name for name in names if one is not None and name in one.gradients]
    if one is None or not names:
        return _unknown(synced, "The run on one rank took no such step.")
    if not _starts_alike(seen, step, one):
        return _unknown(synced, f"Step {number}: one rank starts it with other parameters.")
    mine = joined([step[0].gradients[name].averaged for name in names])
    ones = joined([one.gradients[name].averaged for name in names])
    if len(mine) != len(ones) or not np.isfinite(mine).all() or not np.isfinite(ones).all():
        return _unknown(synced, f"Step {number}: gradients are not finite.")
    tolerated, found, num_ranks = tolerance_of(step, names), relation(mine, ones), len(step)
    has_same = _have_same_samples(step, one)
    if has_same and found.rest <= tolerated:
        return _judge_factor(synced, number, found.factor, found.rest, tolerated, num_ranks)
    if has_same:
        weighed = _judge_weights(step, names, mine, ones, tolerated)
        if weighed is not None:
            return weighed
    return _judge_roughly(synced, step, one, found.factor, found.cosine, has_same=has_same)


def _unknown(synced: JudgedStep, why: str) -> JudgedStep:
    return JudgedStep(evidence=synced.evidence, is_synced=True, why_unknown=why)


def _starts_alike(seen: TwoRuns, step: Sequence[OptimizerStep], one: OptimizerStep) -> bool:
    """Tell whether one rank has the parameters that the ranks have, but for rounding."""
    mine, ones = step[0].state, one.state
    if mine is None or ones is None or mine.parameters == ones.parameters:
        return mine is not None or step[0].number == 0
    if step[0].number == 0:
        return False
    before = (
        _step_before(seen.ranks[0].steps, step[0]),
        _step_before(() if seen.one is None else seen.one.steps, one),
    )
    if before[0] is None or before[1] is None:
        return False
    names = [name for name in before[0].parameters if name in before[1].parameters]
    x = joined([before[0].parameters[name][0] for name in names])
    y = joined([before[1].parameters[name][0] for name in names])
    return len(x) == len(y) and float(np.linalg.norm(x - y)) <= 1e-4 * float(np.linalg.norm(y))


def _step_before(steps: Sequence[OptimizerStep], step: OptimizerStep) -> OptimizerStep | None:
    wanted = step.optimizer, step.number - 1
    return next((s for s in steps if (s.optimizer, s.number) == wanted), None)


def _have_same_samples(step: Sequence[OptimizerStep], one: OptimizerStep) -> bool:
    """Tell whether one rank computed what the ranks did, where all may have computed the same."""
    return _are_the_same([rank.samples for rank in step], one.samples) or _are_the_same(
        [rank.rows for rank in step], one.rows
    )


def _are_the_same(of_ranks: Sequence[tuple[str, ...]], of_one: tuple[str, ...]) -> bool:
    ones = Counter(of_one)
    alone = [Counter(names) for names in of_ranks]
    together = Counter(name for names in of_ranks for name in names)
    all_alike = all(names == alone[0] for names in alone)
    return bool(ones) and (ones == together or (all_alike and ones == alone[0]))


def _judge_factor(
    synced: JudgedStep, number: int, factor: float, rest: float, tolerated: float, num_ranks: int
) -> JudgedStep:
    near = max(2 * tolerated, 1e-3)
    told = (
        f"Step {number}: the gradient of {num_ranks} ranks is {factor:.6g} times that of one rank "
        f"on the same samples; the rest is {rest:.1e} of its length, and rounding explains "
        f"{tolerated:.1e}."
    )
    if abs(factor - 1) <= near:
        return JudgedStep(evidence=told, is_synced=True, is_equal=True)
    power = math.log(factor, num_ranks) if factor > 0 else math.nan
    if abs(power - round(power)) <= near if math.isfinite(power) else False:
        return JudgedStep("gradient-times-n" if power > 0 else "gradient-over-n", told)
    return _unknown(synced, told)


def _judge_weights(
    step: Sequence[OptimizerStep],
    names: Sequence[str],
    mine: Array,
    ones: Array,
    tolerated: float,
) -> JudgedStep | None:
    """Compare how one rank and all ranks weigh the same passes; None where it does not fit."""
    columns = [column for rank in step for column in passes_joined(rank.gradients, names)]
    if not columns or len(columns) >= len(mine):
        return None
    ours, rest = weights(mine, columns)
    theirs, rest_of_one = weights(ones, columns)
    if rest > tolerated or rest_of_one > max(tolerated, 1e-3) or np.ptp(ours) > 0.02 * abs(ours[0]):
        return None
    shares = theirs / theirs.sum()
    if min(shares) < 0 or np.ptp(shares) * len(shares) <= max(10 * tolerated, 0.01):
        return None
    shares_told = ", ".join(f"{share:.4g}" for share in shares)
    micros = [micro for rank in step for micro in rank.micros]
    number = step[0].number
    told = (
        f"Step {number}: all ranks weigh the same ({1 / len(columns):.4g} each pass), but one rank "
        f"on the same samples weighs them {shares_told}"
    )
    sizes = [len(micro.samples) for micro in micros]
    if len(set(sizes)) > 1:
        return JudgedStep("mean-of-means", f"{told}; they have {_counts(sizes)} samples.")
    counted = [micro.num_counted for micro in micros]
    counts = [count for count in counted if count is not None]
    if len(counts) < len(counted) or len(set(counts)) == 1:
        return JudgedStep("weights-of-tokens", f"{told}.")
    if not np.allclose(shares, np.array(counts) / sum(counts), rtol=0.02, atol=1e-3):
        return None
    return JudgedStep(
        "weights-of-tokens", f"{told}; their losses are means over {_counts(counts)}."
    )


def _counts(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _judge_roughly(
    synced: JudgedStep,
    step: Sequence[OptimizerStep],
    one: OptimizerStep,
    factor: float,
    cosine: float,
    *,
    has_same: bool,
) -> JudgedStep:
    """Judge where more than rounding must differ: a factor of N is seen nevertheless."""
    number, num_ranks = step[0].number, len(step)
    has_batch_norm = step[0].state is not None and step[0].state.has_batch_norm
    told = (
        f"Step {number}: the gradient of {num_ranks} ranks is about {factor:.3g} times that of one "
        f"rank (cosine {cosine:.3f})"
    )
    if (has_batch_norm or not has_same) and cosine >= _ENOUGH_COSINE and _counts_match(step, one):
        for check, wanted in (("gradient-times-n", num_ranks), ("gradient-over-n", 1 / num_ranks)):
            if abs(factor / wanted - 1) <= _ENOUGH_FACTOR:
                return JudgedStep(check, f"{told}.")
    if has_batch_norm:
        why = "batch norm takes its statistics over each rank's samples; SyncBatchNorm would not"
    elif not has_same:
        why = "one rank did not compute the same samples, as far as that can be seen"
    else:
        why = "neither rounding nor other weights explain the rest"
    return _unknown(synced, f"{told}: {why}.")


def _counts_match(step: Sequence[OptimizerStep], one: OptimizerStep) -> bool:
    return sum(len(rank.samples) for rank in step) == len(one.samples)

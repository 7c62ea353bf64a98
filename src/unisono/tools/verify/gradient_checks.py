"""Is the gradient of N ranks that of one? Verdicts on averaging, weighting and clipping. Pure.

Each step is judged separately; the first wrong one counts::

    clipped before it was averaged?   → clip-before-average
    not the same on all ranks?        → accumulation-not-synced, gradients-not-averaged,
                                        parameter-not-averaged
    a multiple of one rank's?         → gradient-times-n, gradient-over-n
    other weights than one rank's?    → mean-of-means, weights-of-tokens
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from unisono.runtime.notices import named
from unisono.tools.verify.digests import (
    Array,
    Relation,
    distance,
    joined,
    relation,
    tolerance,
    weights,
)
from unisono.tools.verify.findings import (
    GRADIENT_CHECKS,
    Finding,
    around_mistake,
    ok,
    unknown,
    wrong,
)
from unisono.tools.verify.trace import Gradient, OptimizerStep, TwoRuns

_ENOUGH_COSINE, _ENOUGH_FACTOR = 0.95, 0.15
_STARTS_APART_AT_MOST = 1e-4
_OTHER_SAMPLES = "one rank did not compute the same samples, as far as that can be seen"

Step = Sequence[OptimizerStep]
"""One step, as taken by each rank."""


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """The verdict on one step; fields are empty if nothing is known."""

    check: str = ""  # the mistake
    evidence: str = ""
    is_synced: bool = False  # all ranks have the same gradient
    is_equal: bool = False  # it is that of one rank
    why_unknown: str = ""  # why it could not be compared


def _local(gradient: Gradient) -> Array:
    """Return the sum of one parameter's gradients over a rank's passes."""
    total: Array = np.array(gradient.passes or [[0.0] * len(gradient.final)]).sum(axis=0)
    return total


def _passes(step: OptimizerStep, names: Sequence[str]) -> list[Array]:
    """Return each pass's gradient of all parameters; zeros for those without one in a pass."""
    of_all = [step.gradients[name] for name in names]
    most = max((gradient.passes for gradient in of_all), key=len, default=())
    rows = [
        g.passes if len(g.passes) == len(most) else [[0.0] * len(g.final)] * len(most)
        for g in of_all
    ]
    return [joined(of_pass) for of_pass in zip(*rows, strict=True)]


def _tolerated(step: Step, names: Sequence[str]) -> float:
    size = sum(step[0].gradients[name].size for name in names)
    dtype = "float32" if step[0].state is None else step[0].state.dtype
    return tolerance(dtype, size, step[0].number)


def _compare_with_one(seen: TwoRuns, step: Step, names: Sequence[str]) -> JudgedStep:
    one, told = seen.step_of_one(step[0]), f"Step {step[0].number}:"
    names = [name for name in names if one is not None and name in one.gradients]
    if one is None or not names:
        return _unknown(step, "The run on one rank took no such step.")
    if not _starts_alike(seen, step[0], one):
        return _unknown(step, f"{told} one rank starts it with other parameters.")
    mine, ones = _averaged(step[0], names), _averaged(one, names)
    if len(mine) != len(ones) or not np.isfinite([*mine, *ones]).all():
        return _unknown(step, f"{told} gradients are not finite.")
    found, tolerated = relation(mine, ones), _tolerated(step, names)
    by_name = _are_the_same([rank.samples for rank in step], one.samples)
    if not by_name and not _are_the_same([rank.rows for rank in step], one.rows):
        return _roughly(step, one, found, _OTHER_SAMPLES)
    if found.rest <= tolerated:
        return _factor(step, found, tolerated)
    judged = _weights(step, names, mine, ones, tolerated)
    return judged or _roughly(step, one, found)


def _unknown(step: Step, why: str) -> JudgedStep:
    evidence = f"Step {step[0].number}: all ranks have the same gradient."
    return JudgedStep(evidence=evidence, is_synced=True, why_unknown=why)


def _starts_alike(seen: TwoRuns, mine: OptimizerStep, one: OptimizerStep) -> bool:
    """Return whether one rank has the ranks' parameters, except for rounding."""
    if mine.state is None or one.state is None or mine.state.parameters == one.state.parameters:
        return mine.state is not None or mine.number == 0
    runs = (seen.ranks[0], mine), (seen.one, one)
    before = [
        earlier.parameters
        for run, step in runs
        for earlier in run.of(OptimizerStep)
        if earlier.place == (step.optimizer, step.number - 1)
    ]
    if len(before) < 2:
        return False
    names = [name for name in before[0] if name in before[1]]
    x, y = (joined(map(parameters.__getitem__, names)) for parameters in before)
    return len(x) == len(y) and distance(x, y) <= _STARTS_APART_AT_MOST * float(np.linalg.norm(y))


def _are_the_same(of_ranks: Sequence[tuple[str, ...]], of_one: tuple[str, ...]) -> bool:
    """Return whether one rank computed what the ranks did, who may all have computed the same."""
    ones = Counter(of_one)
    alone = [Counter(names) for names in of_ranks]
    together = Counter(name for names in of_ranks for name in names)
    all_alike = all(names == alone[0] for names in alone)
    return bool(ones) and (ones == together or (all_alike and ones == alone[0]))


def _factor(step: Step, found: Relation, tolerated: float) -> JudgedStep:
    """Judge a gradient that is a multiple of one rank's."""
    num_ranks, near = len(step), max(2 * tolerated, 1e-3)
    told = (
        f"Step {step[0].number}: the gradient of {num_ranks} ranks is {found.factor:.6g} times "
        f"that of one rank on the same samples; the rest is {found.rest:.1e} of its length, "
        f"and rounding explains {tolerated:.1e}."
    )
    if abs(found.factor - 1) <= near:
        return JudgedStep(evidence=told, is_synced=True, is_equal=True)
    power = math.log(found.factor, num_ranks) if found.factor > 0 else 0.5
    if abs(power - round(power)) <= near:
        return JudgedStep("gradient-times-n" if power > 0 else "gradient-over-n", told)
    return _unknown(step, told)


def _weights(
    step: Step, names: Sequence[str], mine: Array, ones: Array, tolerated: float
) -> JudgedStep | None:
    """Compare the weights of passes on one rank and on all; None if they explain nothing."""
    columns = [column for rank in step for column in _passes(rank, names)]
    if not columns or len(columns) >= len(mine):
        return None
    ours, rest = weights(mine, columns)
    theirs, rest_of_one = weights(ones, columns)
    are_explained = rest <= tolerated and rest_of_one <= max(tolerated, 1e-3)
    if not are_explained or np.ptp(ours) > 0.02 * abs(ours[0]):
        return None
    shares = theirs / theirs.sum()
    if min(shares) < 0 or np.ptp(shares) * len(shares) <= max(10 * tolerated, 0.01):
        return None
    sizes = [len(one.samples) for rank in step for one in rank.passes]
    told = (
        f"Step {step[0].number}: all ranks weigh the same ({1 / len(columns):.4g} each pass), but "
        f"one rank on the same samples weighs them {', '.join(f'{one:.4g}' for one in shares)}; "
        f"they have {', '.join(map(str, sizes))} samples."
    )
    return JudgedStep("mean-of-means" if len(set(sizes)) > 1 else "weights-of-tokens", told)


def _roughly(step: Step, one: OptimizerStep, found: Relation, why: str = "") -> JudgedStep:
    """Judge a step whose gradients may differ by more than rounding; still find a factor of N.

    `why` is empty if only batch norm can make one rank's gradient differ.
    """
    num_ranks, state = len(step), step[0].state
    if state is not None and state.has_batch_norm:
        why = "batch norm takes its statistics over each rank's samples; SyncBatchNorm would not"
    told = (
        f"Step {step[0].number}: the gradient of {num_ranks} ranks is about {found.factor:.3g} "
        f"times that of one rank (cosine {found.cosine:.3f})"
    )
    are_as_many = sum(len(rank.samples) for rank in step) == len(one.samples)
    if why and found.cosine >= _ENOUGH_COSINE and are_as_many:
        for check, n in (("gradient-times-n", num_ranks), ("gradient-over-n", 1 / num_ranks)):
            if abs(found.factor / n - 1) <= _ENOUGH_FACTOR:
                return JudgedStep(check, f"{told}.")
    return _unknown(
        step, f"{told}: {why or 'neither rounding nor other weights explain the rest'}."
    )


_SYNC_CHECKS = tuple(GRADIENT_CHECKS)[:4]
_AVERAGES_PARAMETERS = JudgedStep(
    why_unknown="Parameters, not gradients, are averaged: gradients differ, and parameters are the "
    "same before the next step.",
)


def check_gradients(seen: TwoRuns) -> list[Finding]:
    """Return findings on all steps whose gradients were kept."""
    judged: list[JudgedStep] = []
    steps = seen.steps()
    for step, later in zip_longest(steps, steps[1:]):
        if not all(rank.gradients for rank in step):
            continue
        if later is None and _AVERAGES_PARAMETERS in judged:
            break
        found = _judge(seen, step, later)
        if found.check:
            mistake = wrong(found.check, found.evidence)
            were_equal = any(one.is_equal for one in judged)
            return around_mistake(mistake, tuple(GRADIENT_CHECKS), were_well=were_equal)
        judged.append(found)
    synced = [one.evidence for one in judged if one.is_synced]
    equal = [one.evidence for one in judged if one.is_equal]
    reasons = [one.why_unknown for one in judged if one.why_unknown]
    why = reasons[0] if reasons else "No step of an optimizer with gradients was seen on all ranks."
    good = {check: synced if check in _SYNC_CHECKS else equal for check in GRADIENT_CHECKS}
    return [ok(check, told[0]) if told else unknown(check, why) for check, told in good.items()]


def _judge(seen: TwoRuns, step: Step, later: Step | None) -> JudgedStep:
    names = [name for name in step[0].gradients if _is_comparable(step, name)]
    if not names:
        return JudgedStep(
            why_unknown="Ranks update different parameters, as with sharded optimizers."
        )
    if clipped := [name for name in names if _is_clipped_before(step, name)]:
        return JudgedStep("clip-before-average", _clip_evidence(clipped, step))
    tolerated = _tolerated(step, names)
    telling = [n for n in names if _are_apart([_local(r.gradients[n]) for r in step], 1e-6)]
    apart = [n for n in telling if _are_apart([_averaged(r, [n]) for r in step], tolerated)]
    if apart:
        return _judge_apart(step, later, telling, apart)
    compared = _compare_with_one(seen, step, names)
    if not telling and not compared.is_equal:
        why = compared.why_unknown or "Every rank computed the same gradients, averaged or not."
        return JudgedStep(compared.check, compared.evidence, why_unknown=why)
    return compared


def _is_comparable(step: Step, name: str) -> bool:
    gradients = [rank.gradients[name] for rank in step if name in rank.gradients]
    return len(gradients) == len(step) and len({(g.size, len(g.final)) for g in gradients}) == 1


def _is_clipped_before(step: Step, name: str) -> bool:
    gradients = [rank.gradients[name] for rank in step]
    clipped = {tuple(gradient.clipped) for gradient in gradients if gradient.clipped is not None}
    are_one = len({tuple(gradient.final) for gradient in gradients}) == 1
    return are_one and len(clipped) > 1


def _clip_evidence(names: Sequence[str], step: Step) -> str:
    norms = [np.linalg.norm(_averaged(rank, names)) for rank in step]
    told = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in enumerate(norms))
    return (
        f"Step {step[0].number}: gradients were clipped while each rank still had its own (norm "
        f"{told}), and averaged after that."
    )


def _are_apart(vectors: Sequence[Array], tolerated: float) -> bool:
    longest = max(float(np.linalg.norm(vector)) for vector in vectors)
    furthest = max(distance(vector, vectors[0]) for vector in vectors)
    return math.isfinite(longest) and furthest > tolerated * longest


def _judge_apart(
    step: Step, later: Step | None, telling: Sequence[str], apart: Sequence[str]
) -> JudgedStep:
    number = step[0].number
    states = [rank.state.parameters for rank in later or () if rank.state is not None]
    digests = [[one.get(name) for one in states] for name in apart]
    if states and all(of_ranks[0] and len(set(of_ranks)) == 1 for of_ranks in digests):
        return _AVERAGES_PARAMETERS
    num_passes = max(len(step[0].gradients[name].passes) for name in apart)
    shown = named(apart, 3)
    if len(apart) < len(telling):
        return JudgedStep(
            "parameter-not-averaged",
            f"Step {number}: each rank has its own gradient of {shown}; those of the other "
            f"{len(telling) - len(apart)} parameters are the same on all ranks.",
        )
    is_partly = any(rank.no_sync or _is_partly_averaged(rank, apart) for rank in step)
    if num_passes > 1 and is_partly:
        return JudgedStep(
            "accumulation-not-synced",
            f"Step {number}: {num_passes} backward passes were accumulated, and not all of them "
            f"averaged: each rank has its own gradient of {shown}.",
        )
    return JudgedStep(
        "gradients-not-averaged",
        f"Step {number}: each rank's optimizer got the gradient of that rank's samples only; all "
        f"{len(apart)} parameters differ between ranks ({shown}).",
    )


def _is_partly_averaged(rank: OptimizerStep, names: Sequence[str]) -> bool:
    """Return whether a rank's gradient differs from the sum of its passes."""
    own = np.concatenate([_local(rank.gradients[name]) for name in names])
    return relation(_averaged(rank, names), own).rest > 1e-3


def _averaged(rank: OptimizerStep, names: Sequence[str]) -> Array:
    """Return a rank's gradients of all parameters before they were clipped."""
    return joined(rank.gradients[name].averaged for name in names)

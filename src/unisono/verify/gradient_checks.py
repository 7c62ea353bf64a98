"""Is the gradient of N ranks that of one? Verdicts on averaging, weighing and clipping. Pure.

Each step is judged alone, the first wrong one counts::

    clipped before it was averaged?   → clip-before-average
    not the same on all ranks?        → accumulation-not-synced, gradients-not-averaged,
                                        parameter-not-averaged
    a multiple of one rank's?         → gradient-times-n, gradient-over-n
    other weights than one rank's?    → mean-of-means, weights-of-tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unisono.notices import named
from unisono.verdicts import Finding
from unisono.verify.findings import GRADIENT_CHECKS, around_mistake, ok, unknown, wrong
from unisono.verify.gradient_of_one import JudgedStep, Step, compare_with_one, tolerance_of
from unisono.verify.linear import Array, distance, joined, local, relation
from unisono.verify.trace import TwoRuns

_SYNC_CHECKS = tuple(GRADIENT_CHECKS)[:4]
_AVERAGES_PARAMETERS = JudgedStep(
    why_unknown="Parameters, not gradients, are averaged: they differ after the step and are the "
    "same before the next.",
)


def check_gradients(seen: TwoRuns) -> list[Finding]:
    """Judge all steps whose gradients were kept."""
    judged: list[JudgedStep] = []
    steps = seen.steps()
    for at, step in enumerate(steps):
        if not all(rank.gradients for rank in step):
            continue
        later = steps[at + 1] if at + 1 < len(steps) else None
        if later is None and _AVERAGES_PARAMETERS in judged:
            break
        found = _judge(seen, step, later)
        if found.check:
            mistake = wrong(found.check, found.evidence)
            were_equal = any(one.is_equal for one in judged)
            return around_mistake(mistake, GRADIENT_CHECKS, were_well=were_equal)
        judged.append(found)
    return _without_mistake(judged)


def _without_mistake(judged: Sequence[JudgedStep]) -> list[Finding]:
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
    clipped = [name for name in names if _is_clipped_before(step, name)]
    if clipped:
        return JudgedStep("clip-before-average", _clip_evidence(clipped, step))
    tolerated = tolerance_of(step, names)
    telling = [name for name in names if _are_apart([local(r.gradients[name]) for r in step], 1e-6)]
    apart = [
        name
        for name in telling
        if len({r.gradients[name].digest for r in step}) > 1
        and _are_apart([joined([r.gradients[name].averaged]) for r in step], tolerated)
    ]
    if apart:
        return _judge_apart(step, later, telling, apart)
    compared = compare_with_one(seen, step, names)
    if not telling and not compared.is_equal:
        why = compared.why_unknown or "Every rank computed the same gradients, averaged or not."
        return JudgedStep(compared.check, compared.evidence, why_unknown=why)
    return compared


def _is_comparable(step: Step, name: str) -> bool:
    gradients = [rank.gradients[name] for rank in step if name in rank.gradients]
    return len(gradients) == len(step) and len({(g.size, len(g.final)) for g in gradients}) == 1


def _is_clipped_before(step: Step, name: str) -> bool:
    gradients = [rank.gradients[name] for rank in step]
    if any(gradient.clipped is None for gradient in gradients):
        return False
    were_apart = len({gradient.clipped_digest for gradient in gradients}) > 1
    are_one = len({gradient.digest for gradient in gradients}) == 1
    return were_apart and are_one


def _clip_evidence(names: Sequence[str], step: Step) -> str:
    norms = [
        np.linalg.norm(joined([rank.gradients[n].clipped or () for n in names])) for rank in step
    ]
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
    """Judge a step whose gradients differ between ranks."""
    number = step[0].number
    if _are_averaged_later(step, later):
        return _AVERAGES_PARAMETERS
    num_passes = max(len(step[0].gradients[name].passes) for name in apart)
    shown = named(apart, 3)
    if len(apart) < len(telling):
        return JudgedStep(
            "parameter-not-averaged",
            f"Step {number}: each rank has its own gradient of {shown}; those of the other "
            f"{len(telling) - len(apart)} parameters are the same on all ranks.",
        )
    cooperates = any(rank.no_sync or rank.num_collectives for rank in step)
    if num_passes > 1 and (cooperates or _is_partly_averaged(step, apart)):
        return JudgedStep(
            "accumulation-not-synced",
            f"Step {number}: {num_passes} backward passes were accumulated, and not all of them "
            f"averaged: each rank has its own gradient of {shown}.",
        )
    return JudgedStep(
        "gradients-not-averaged",
        f"Step {number}: each rank's optimizer got the gradient of its own samples alone; all "
        f"{len(apart)} parameters differ between ranks ({shown}).",
    )


def _are_averaged_later(step: Step, later: Step | None) -> bool:
    """Tell whether parameters differ after a step and are the same before the next one."""
    if later is None or any(rank.state is None for rank in later):
        return False
    after = [{name: digest for name, (_, digest) in rank.parameters.items()} for rank in step]
    before = [rank.state.parameters for rank in later if rank.state is not None]
    apart = [name for name in after[0] if len({one.get(name) for one in after}) > 1]
    return bool(apart) and all(
        name in before[0] and len({one.get(name) for one in before}) == 1 for name in apart
    )


def _is_partly_averaged(step: Step, names: Sequence[str]) -> bool:
    """Tell whether a rank's gradient is other than the sum of its own passes."""
    for rank in step:
        own = joined([tuple(local(rank.gradients[name])) for name in names])
        final = joined([rank.gradients[name].averaged for name in names])
        if relation(final, own).rest > 1e-3:
            return True
    return False

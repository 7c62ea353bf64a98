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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.verify.findings import Finding, ok, unknown, wrong
from unisono.verify.linear import (
    Array,
    joined,
    local,
    passes_joined,
    relation,
    tolerance,
    weights,
)
from unisono.verify.rank_trace import OptimizerStep, TwoRuns

CHECKS = (
    "clip-before-average",
    "accumulation-not-synced",
    "gradients-not-averaged",
    "parameter-not-averaged",
    "gradient-times-n",
    "gradient-over-n",
    "mean-of-means",
    "weights-of-tokens",
)
_SYNC_CHECKS = CHECKS[:4]
_REMEDIES = {
    "clip-before-average": "Average first, then clip: call `clip_grad_norm_` after the gradients "
    "have been averaged, so that all ranks clip by the same norm.",
    "accumulation-not-synced": "Leave `no_sync` for the last pass before `optimizer.step()`, "
    "forward and backward both, or average what has been accumulated, once, before the step.",
    "gradients-not-averaged": "Wrap the model in `DistributedDataParallel` and call the wrapper, "
    "or `all_reduce` every gradient and divide by the world size before `optimizer.step()`.",
    "parameter-not-averaged": "Average the gradients of all parameters that the optimizer updates: "
    "put all modules into the one that is wrapped in `DistributedDataParallel`.",
    "gradient-times-n": "Divide the sum of gradients by the world size (or use `ReduceOp.AVG`), "
    "once; DDP does so by itself.",
    "gradient-over-n": "Divide by the world size once: DDP averages already, so neither the loss "
    "nor the gradients are to be divided again.",
    "mean-of-means": "Give all ranks the same number of samples, or weigh: multiply a rank's mean "
    "loss by `its samples · world size / all samples` before `backward()`.",
    "weights-of-tokens": "Sum the loss over tokens and divide by the number of tokens on all ranks "
    "(`all_reduce` it), times the world size where gradients are averaged.",
}
_ENOUGH_COSINE, _ENOUGH_FACTOR = 0.95, 0.15


@dataclass(frozen=True, slots=True)
class _Judged:
    """What one step shows: a mistake, or how far all is well; empty where nothing can be said."""

    check: str = ""
    evidence: str = ""
    is_synced: bool = False
    is_equal: bool = False
    averages_parameters: bool = False
    why_unknown: str = ""


def check_gradients(seen: TwoRuns) -> list[Finding]:
    """Judge all steps whose gradients were kept."""
    judged: list[_Judged] = []
    steps = seen.steps()
    for at, step in enumerate(steps):
        if not all(rank.gradients for rank in step):
            continue
        later = steps[at + 1] if at + 1 < len(steps) else None
        if later is None and any(one.averages_parameters for one in judged):
            break
        judged.append(_judge(seen, step, later))
        if judged[-1].check:
            return _with_mistake(judged[-1], judged[:-1])
    return _without_mistake(judged)


def _with_mistake(mistake: _Judged, before: Sequence[_Judged]) -> list[Finding]:
    """Name one mistake; what the same step cannot show any more is unknown, unless it was seen."""
    findings = []
    for check in CHECKS:
        if check == mistake.check:
            findings.append(wrong(check, mistake.evidence, _REMEDIES[check]))
        elif CHECKS.index(check) < CHECKS.index(mistake.check) or any(b.is_equal for b in before):
            findings.append(ok(check, "No sign of it."))
        else:
            findings.append(unknown(check, f"Hidden behind `{mistake.check}`."))
    return findings


def _without_mistake(judged: Sequence[_Judged]) -> list[Finding]:
    synced = [one for one in judged if one.is_synced]
    equal = [one for one in judged if one.is_equal]
    reasons = [one.why_unknown for one in judged if one.why_unknown]
    why = reasons[0] if reasons else "No step of an optimizer with gradients was seen on all ranks."
    findings = []
    for check in CHECKS:
        good = synced if check in _SYNC_CHECKS else equal
        if good:
            findings.append(ok(check, good[0].evidence))
        else:
            findings.append(unknown(check, why))
    return findings


def _judge(
    seen: TwoRuns, step: Sequence[OptimizerStep], later: Sequence[OptimizerStep] | None
) -> _Judged:
    names = [name for name in step[0].gradients if all(name in r.gradients for r in step)]
    names = [name for name in names if _are_comparable(step, name)]
    if not names:
        return _Judged(why_unknown="Ranks update different parameters, as with sharded optimizers.")
    if len(step) == 1:
        return _Judged(why_unknown="There is one rank alone.")
    number = step[0].number
    clipped = [name for name in names if _is_clipped_before(step, name)]
    if clipped:
        return _Judged("clip-before-average", _clip_evidence(number, clipped, step))
    tolerated = _tolerance(step, names)
    telling = [name for name in names if _are_apart([local(r.gradients[name]) for r in step], 1e-6)]
    apart = [
        name
        for name in telling
        if len({r.gradients[name].digest for r in step}) > 1
        and _are_apart([joined([r.gradients[name].averaged]) for r in step], tolerated)
    ]
    if apart:
        return _judge_apart(step, later, telling, apart)
    compared = _compare_with_one(seen, step, names)
    if not telling and not compared.is_equal:
        why = compared.why_unknown or "Every rank computed the same gradients, averaged or not."
        return _Judged(compared.check, compared.evidence, why_unknown=why)
    return compared


def _are_comparable(step: Sequence[OptimizerStep], name: str) -> bool:
    return len({(r.gradients[name].size, len(r.gradients[name].final)) for r in step}) == 1


def _is_clipped_before(step: Sequence[OptimizerStep], name: str) -> bool:
    gradients = [rank.gradients[name] for rank in step]
    if any(gradient.clipped is None for gradient in gradients):
        return False
    were_apart = len({gradient.clipped_digest for gradient in gradients}) > 1
    are_one = len({gradient.digest for gradient in gradients}) == 1
    return were_apart and are_one


def _clip_evidence(number: int, names: Sequence[str], step: Sequence[OptimizerStep]) -> str:
    norms = [
        np.linalg.norm(joined([rank.gradients[n].clipped or () for n in names])) for rank in step
    ]
    told = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in enumerate(norms))
    return (
        f"Step {number}: gradients were clipped while each rank still had its own (norm {told}), "
        f"and averaged after that."
    )


def _are_apart(vectors: Sequence[Array], tolerated: float) -> bool:
    longest = max(float(np.linalg.norm(vector)) for vector in vectors)
    if longest == 0 or not math.isfinite(longest):
        return False
    return any(
        float(np.linalg.norm(vector - vectors[0])) > tolerated * longest for vector in vectors[1:]
    )


def _tolerance(step: Sequence[OptimizerStep], names: Sequence[str]) -> float:
    size = sum(step[0].gradients[name].size for name in names)
    dtype = "float32" if step[0].state is None else step[0].state.dtype
    return tolerance(dtype, size, step[0].number)


def _judge_apart(
    step: Sequence[OptimizerStep],
    later: Sequence[OptimizerStep] | None,
    telling: Sequence[str],
    apart: Sequence[str],
) -> _Judged:
    """Judge a step whose gradients differ between ranks."""
    number = step[0].number
    if _are_averaged_later(step, later):
        return _Judged(
            averages_parameters=True,
            why_unknown="Parameters, not gradients, are averaged: they differ after the step and "
            "are the same before the next.",
        )
    num_passes = max(len(step[0].gradients[name].passes) for name in apart)
    shown = _listed(apart)
    if len(apart) < len(telling):
        return _Judged(
            "parameter-not-averaged",
            f"Step {number}: each rank has its own gradient of {shown}; those of the other "
            f"{len(telling) - len(apart)} parameters are the same on all ranks.",
        )
    cooperates = any(rank.no_sync or rank.num_collectives for rank in step)
    if num_passes > 1 and (cooperates or _is_partly_averaged(step, apart)):
        return _Judged(
            "accumulation-not-synced",
            f"Step {number}: {num_passes} backward passes were accumulated, and not all of them "
            f"averaged: each rank has its own gradient of {shown}.",
        )
    return _Judged(
        "gradients-not-averaged",
        f"Step {number}: each rank's optimizer got the gradient of its own samples alone; all "
        f"{len(apart)} parameters differ between ranks ({shown}).",
    )


def _are_averaged_later(
    step: Sequence[OptimizerStep], later: Sequence[OptimizerStep] | None
) -> bool:
    """Tell whether parameters differ after a step and are the same before the next one."""
    if later is None or any(rank.state is None for rank in later):
        return False
    after = [{name: digest for name, (_, digest) in rank.parameters.items()} for rank in step]
    before = [rank.state.parameters for rank in later if rank.state is not None]
    apart = [name for name in after[0] if len({one.get(name) for one in after}) > 1]
    return bool(apart) and all(
        name in before[0] and len({one.get(name) for one in before}) == 1 for name in apart
    )


def _is_partly_averaged(step: Sequence[OptimizerStep], names: Sequence[str]) -> bool:
    """Tell whether a rank's gradient is other than the sum of its own passes."""
    for rank in step:
        own = joined([tuple(local(rank.gradients[name])) for name in names])
        final = joined([rank.gradients[name].averaged for name in names])
        if relation(final, own).rest > 1e-3:
            return True
    return False


def _compare_with_one(
    seen: TwoRuns, step: Sequence[OptimizerStep], names: Sequence[str]
) -> _Judged:
    """Compare the gradient that all ranks have with that of one rank."""
    one = seen.step_of_one(step[0])
    number, evidence = step[0].number, f"Step {step[0].number}: all ranks have the same gradient."
    synced = _Judged(evidence=evidence, is_synced=True)
    names = [name for name in names if one is not None and name in one.gradients]
    if one is None or not names:
        return _unknown(synced, "The run on one rank took no such step.")
    if not _starts_alike(seen, step, one):
        return _unknown(synced, f"Step {number}: one rank starts it with other parameters.")
    mine = joined([step[0].gradients[name].averaged for name in names])
    ones = joined([one.gradients[name].averaged for name in names])
    if len(mine) != len(ones) or not np.isfinite(mine).all() or not np.isfinite(ones).all():
        return _unknown(synced, f"Step {number}: gradients are not finite.")
    tolerated, found, num_ranks = _tolerance(step, names), relation(mine, ones), len(step)
    has_same = _have_same_samples(step, one)
    if has_same and found.rest <= tolerated:
        return _judge_factor(synced, number, found.factor, found.rest, tolerated, num_ranks)
    if has_same:
        weighed = _judge_weights(step, names, mine, ones, tolerated)
        if weighed is not None:
            return weighed
    return _judge_roughly(synced, step, one, found.factor, found.cosine, has_same=has_same)


def _unknown(synced: _Judged, why: str) -> _Judged:
    return _Judged(evidence=synced.evidence, is_synced=True, why_unknown=why)


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
    synced: _Judged, number: int, factor: float, rest: float, tolerated: float, num_ranks: int
) -> _Judged:
    near = max(2 * tolerated, 1e-3)
    told = (
        f"Step {number}: the gradient of {num_ranks} ranks is {factor:.6g} times that of one rank "
        f"on the same samples; the rest is {rest:.1e} of its length, and rounding explains "
        f"{tolerated:.1e}."
    )
    if abs(factor - 1) <= near:
        return _Judged(evidence=told, is_synced=True, is_equal=True)
    power = math.log(factor, num_ranks) if factor > 0 else math.nan
    if abs(power - round(power)) <= near if math.isfinite(power) else False:
        return _Judged("gradient-times-n" if power > 0 else "gradient-over-n", told)
    return _unknown(synced, told)


def _judge_weights(
    step: Sequence[OptimizerStep],
    names: Sequence[str],
    mine: Array,
    ones: Array,
    tolerated: float,
) -> _Judged | None:
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
        return _Judged("mean-of-means", f"{told}; they have {_counts(sizes)} samples.")
    counted = [micro.num_counted for micro in micros]
    counts = [count for count in counted if count is not None]
    if len(counts) < len(counted) or len(set(counts)) == 1:
        return _Judged("weights-of-tokens", f"{told}.")
    if not np.allclose(shares, np.array(counts) / sum(counts), rtol=0.02, atol=1e-3):
        return None
    return _Judged("weights-of-tokens", f"{told}; their losses are means over {_counts(counts)}.")


def _counts(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _judge_roughly(
    synced: _Judged,
    step: Sequence[OptimizerStep],
    one: OptimizerStep,
    factor: float,
    cosine: float,
    *,
    has_same: bool,
) -> _Judged:
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
                return _Judged(check, f"{told}.")
    if has_batch_norm:
        why = "batch norm takes its statistics over each rank's samples; SyncBatchNorm would not"
    elif not has_same:
        why = "one rank did not compute the same samples, as far as that can be seen"
    else:
        why = "neither rounding nor other weights explain the rest"
    return _unknown(synced, f"{told}: {why}.")


def _counts_match(step: Sequence[OptimizerStep], one: OptimizerStep) -> bool:
    return sum(len(rank.samples) for rank in step) == len(one.samples)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"

"""How is the gradient that all ranks have related to that of one rank on the same samples?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.verify.linear import distance, joined, passes_joined, relation, tolerance, weights
from unisono.verify.trace import OptimizerStep, TwoRuns

_ENOUGH_COSINE, _ENOUGH_FACTOR = 0.95, 0.15
_STARTS_APART_AT_MOST = 1e-4

Step = Sequence[OptimizerStep]
"""One step, as each rank took it."""


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """What one step shows; empty where nothing can be said."""

    check: str = ""  # the mistake
    evidence: str = ""  # what was seen
    is_synced: bool = False  # all ranks have the same gradient
    is_equal: bool = False  # it is that of one rank
    why_unknown: str = ""  # why it could not be compared


def tolerance_of(step: Step, names: Sequence[str]) -> float:
    """Return how far gradients of a step may be apart by rounding."""
    size = sum(step[0].gradients[name].size for name in names)
    dtype = "float32" if step[0].state is None else step[0].state.dtype
    return tolerance(dtype, size, step[0].number)


def compare_with_one(seen: TwoRuns, step: Step, names: Sequence[str]) -> JudgedStep:
    """Compare the gradient that all ranks have with that of one rank.

    Args:
        seen: both runs.
        step: of all ranks.
        names: of the parameters that all ranks have a gradient of.
    """
    one, number = seen.step_of_one(step[0]), step[0].number
    names = [name for name in names if one is not None and name in one.gradients]
    if one is None or not names:
        return _unknown(number, "The run on one rank took no such step.")
    if not _starts_alike(seen, step[0], one):
        return _unknown(number, f"Step {number}: one rank starts it with other parameters.")
    return _Comparison(step, one, names).judged()


def _unknown(number: int, why: str) -> JudgedStep:
    evidence = f"Step {number}: all ranks have the same gradient."
    return JudgedStep(evidence=evidence, is_synced=True, why_unknown=why)


def _starts_alike(seen: TwoRuns, mine: OptimizerStep, one: OptimizerStep) -> bool:
    """Tell whether one rank has the parameters that the ranks have, but for rounding."""
    if mine.state is None or one.state is None or mine.state.parameters == one.state.parameters:
        return mine.state is not None or mine.number == 0
    runs = (seen.ranks[0], mine), (seen.one, one)
    before = [
        earlier.parameters
        for run, step in runs
        for earlier in (() if run is None else run.steps)
        if (earlier.optimizer, earlier.number + 1) == (step.optimizer, step.number)
    ]
    if len(before) < 2:
        return False
    names = [name for name in before[0] if name in before[1]]
    x, y = (joined([parameters[name][0] for name in names]) for parameters in before)
    return len(x) == len(y) and distance(x, y) <= _STARTS_APART_AT_MOST * float(np.linalg.norm(y))


def _are_the_same(of_ranks: Sequence[tuple[str, ...]], of_one: tuple[str, ...]) -> bool:
    """Tell whether one rank computed what the ranks did, where all may have computed the same."""
    ones = Counter(of_one)
    alone = [Counter(names) for names in of_ranks]
    together = Counter(name for names in of_ranks for name in names)
    all_alike = all(names == alone[0] for names in alone)
    return bool(ones) and (ones == together or (all_alike and ones == alone[0]))


class _Comparison:
    """One step of all ranks beside the same step of one."""

    def __init__(self, step: Step, one: OptimizerStep, names: Sequence[str]) -> None:
        self._step, self._one, self._names = step, one, names
        self._number = step[0].number
        self._tolerated = tolerance_of(step, names)
        self._mine = joined([step[0].gradients[name].averaged for name in names])
        self._ones = joined([one.gradients[name].averaged for name in names])
        by_name = _are_the_same([rank.samples for rank in step], one.samples)
        self._has_same_samples = by_name or _are_the_same([rank.rows for rank in step], one.rows)

    def judged(self) -> JudgedStep:
        """Look for a factor, then for other weights, then for a factor beside other differences."""
        mine, ones = self._mine, self._ones
        if len(mine) != len(ones) or not np.isfinite([*mine, *ones]).all():
            return _unknown(self._number, f"Step {self._number}: gradients are not finite.")
        if not self._has_same_samples:
            return self._roughly()
        if relation(mine, ones).rest <= self._tolerated:
            return self._factor()
        return self._weights() or self._roughly()

    def _factor(self) -> JudgedStep:
        found, num_ranks = relation(self._mine, self._ones), len(self._step)
        near = max(2 * self._tolerated, 1e-3)
        told = (
            f"Step {self._number}: the gradient of {num_ranks} ranks is {found.factor:.6g} times "
            f"that of one rank on the same samples; the rest is {found.rest:.1e} of its length, "
            f"and rounding explains {self._tolerated:.1e}."
        )
        if abs(found.factor - 1) <= near:
            return JudgedStep(evidence=told, is_synced=True, is_equal=True)
        power = math.log(found.factor, num_ranks) if found.factor > 0 else 0.5
        if abs(power - round(power)) <= near:
            return JudgedStep("gradient-times-n" if power > 0 else "gradient-over-n", told)
        return _unknown(self._number, told)

    def _weights(self) -> JudgedStep | None:
        """Compare how one rank and all ranks weigh the same passes; None where it does not fit."""
        columns = [c for rank in self._step for c in passes_joined(rank.gradients, self._names)]
        if not columns or len(columns) >= len(self._mine):
            return None
        ours, rest = weights(self._mine, columns)
        theirs, rest_of_one = weights(self._ones, columns)
        are_explained = rest <= self._tolerated and rest_of_one <= max(self._tolerated, 1e-3)
        if not are_explained or np.ptp(ours) > 0.02 * abs(ours[0]):
            return None
        shares = theirs / theirs.sum()
        if min(shares) < 0 or np.ptp(shares) * len(shares) <= max(10 * self._tolerated, 0.01):
            return None
        told = (
            f"Step {self._number}: all ranks weigh the same ({1 / len(columns):.4g} each pass), "
            f"but one rank on the same samples weighs them "
            f"{', '.join(f'{share:.4g}' for share in shares)}"
        )
        micros = [micro for rank in self._step for micro in rank.micros]
        sizes = [len(micro.samples) for micro in micros]
        if len(set(sizes)) > 1:
            return JudgedStep("mean-of-means", f"{told}; they have {_listed(sizes)} samples.")
        counts = [micro.num_counted for micro in micros if micro.num_counted is not None]
        if len(counts) < len(micros) or len(set(counts)) == 1:
            return JudgedStep("weights-of-tokens", f"{told}.")
        if not np.allclose(shares, np.array(counts) / sum(counts), rtol=0.02, atol=1e-3):
            return None
        told = f"{told}; their losses are means over {_listed(counts)}."
        return JudgedStep("weights-of-tokens", told)

    def _roughly(self) -> JudgedStep:
        """Judge where more than rounding must differ: a factor of N is seen nevertheless."""
        found, num_ranks = relation(self._mine, self._ones), len(self._step)
        state = self._step[0].state
        has_batch_norm = state is not None and state.has_batch_norm
        told = (
            f"Step {self._number}: the gradient of {num_ranks} ranks is about {found.factor:.3g} "
            f"times that of one rank (cosine {found.cosine:.3f})"
        )
        are_as_many = sum(len(rank.samples) for rank in self._step) == len(self._one.samples)
        must_differ = has_batch_norm or not self._has_same_samples
        if must_differ and found.cosine >= _ENOUGH_COSINE and are_as_many:
            for check, n in (("gradient-times-n", num_ranks), ("gradient-over-n", 1 / num_ranks)):
                if abs(found.factor / n - 1) <= _ENOUGH_FACTOR:
                    return JudgedStep(check, f"{told}.")
        if has_batch_norm:
            why = (
                "batch norm takes its statistics over each rank's samples; SyncBatchNorm would not"
            )
        elif not self._has_same_samples:
            why = "one rank did not compute the same samples, as far as that can be seen"
        else:
            why = "neither rounding nor other weights explain the rest"
        return _unknown(self._number, f"{told}: {why}.")


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))

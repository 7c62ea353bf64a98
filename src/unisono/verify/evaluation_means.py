"""Do ranks with fewer samples weigh as much as others in what an evaluation says? Pure.

A mean over ranks of each rank's mean is not the mean over samples where ranks have different
numbers of them. Seen from outside: the numbers that ranks add up, weighted by their samples, are
what one rank has of all of them; as they are added up, they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.verify.findings import OK, WRONG, Finding, wrong
from unisono.verify.rank_trace import EvaluationPass, TwoRuns

CHECK = "mean-of-means"
_ROUNDING = 1e-4  # parameters that were trained apart by rounding give other losses
_SUMS = ("all_reduce", "reduce")


def with_means_of_evaluations(findings: Sequence[Finding], seen: TwoRuns) -> list[Finding]:
    """Put a mean of means in an evaluation in the place of the verdict on training.

    Unless training was found equal, models may differ, and with them all evaluations.
    """
    verdicts = {finding.check: finding.verdict for finding in findings}
    is_trained_alike = verdicts.get("parameters-differ") == OK and WRONG not in verdicts.values()
    if not is_trained_alike or _has_batch_norm(seen):
        return list(findings)
    found = next(_means_of_means(seen), None)
    if found is None:
        return list(findings)
    return [found if finding.check == CHECK else finding for finding in findings]


def _has_batch_norm(seen: TwoRuns) -> bool:
    """Tell whether ranks may have averages of their own, so that evaluations differ rightly."""
    steps = [step for rank in seen.ranks for step in rank.steps]
    return any(step.state is not None and step.state.has_batch_norm for step in steps)


def _means_of_means(seen: TwoRuns) -> Iterator[Finding]:
    alone = () if seen.one is None else seen.one.evaluations
    for at, one in enumerate(alone):
        ranks = [rank.evaluations[at] for rank in seen.ranks if at < len(rank.evaluations)]
        if len(ranks) < seen.world_size or not _are_comparable(ranks, one):
            continue
        sizes = [len(rank.rows) for rank in ranks]
        for given, joint, single in _numbers(ranks, one):
            if _is_mean_of_means(given, joint, single, sizes):
                yield wrong(
                    CHECK,
                    f"Evaluation {at}: ranks have {_listed(sizes)} samples and means of "
                    f"{_listed([f'{mean:.6g}' for mean in given])}, which are averaged as if they "
                    f"had equally many; the mean over all samples is {single:.6g}.",
                    "Add up sums and numbers of samples (`all_reduce` both), and divide then.",
                )


def _are_comparable(ranks: Sequence[EvaluationPass], one: EvaluationPass) -> bool:
    """Tell whether ranks of different sizes computed together what one rank did, each once."""
    if not all(rank.is_finished for rank in (*ranks, one)):
        return False
    if len({len(rank.rows) for rank in ranks}) == 1:
        return False
    together = sorted(row for rank in ranks for row in rank.rows)
    return bool(together) and together == sorted(one.rows)


def _numbers(
    ranks: Sequence[EvaluationPass], one: EvaluationPass
) -> Iterator[tuple[list[float], float, float]]:
    """Give what ranks add up, one number each; their sum or mean; and one rank's own number."""
    calls = [*zip(*(rank.collectives for rank in ranks), strict=False)]
    if {len(rank.collectives) for rank in (*ranks, one)} != {len(calls)}:
        return
    for together, alone in zip(calls, one.collectives, strict=True):
        shapes = {(call.name, len(call.given), len(call.values)) for call in (*together, alone)}
        if len(shapes) == 1 and alone.name in _SUMS and len(alone.given) == len(alone.values):
            for position, single in enumerate(alone.given):
                given = [call.given[position] for call in together]
                yield given, together[0].values[position], single


def _is_mean_of_means(
    given: Sequence[float], joint: float, single: float, sizes: Sequence[int]
) -> bool:
    """Tell whether ranks average their means, and the mean over samples is another."""
    total, mean = sum(given), sum(given) / len(given)
    weighted = sum(value * size for value, size in zip(given, sizes, strict=True)) / sum(sizes)
    tolerated = _ROUNDING * max(map(abs, (*given, single)))
    is_joint = min(abs(joint - total), abs(joint - mean)) <= tolerated
    return is_joint and abs(weighted - single) <= tolerated < abs(mean - single)


def _listed(parts: Sequence[object]) -> str:
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}"

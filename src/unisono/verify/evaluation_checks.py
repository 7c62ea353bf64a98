"""Is the result of an evaluation that of the whole set, each sample counted once? Pure.

A mean over ranks of each rank's mean is not the mean over samples where ranks have different
numbers of them. Seen from outside: the numbers that ranks add up, weighted by their samples, are
what one rank has of all of them; as they are added up, they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.verify.findings import OK, WRONG, Finding, ok, unknown, wrong
from unisono.verify.rank_trace import EvaluationPass, TwoRuns

_SUMS = ("all_reduce", "reduce")
_MEAN_OF_MEANS = "mean-of-means"
_ROUNDING = 1e-4  # parameters that were trained apart by rounding give other losses


def check_evaluations(seen: TwoRuns) -> list[Finding]:
    """Judge every evaluation that was seen."""
    return [_partial(seen), _counts_twice(seen)]


def _evaluations(seen: TwoRuns) -> list[list[EvaluationPass]]:
    """Give what ranks did in each evaluation; ranks that took no part are left out."""
    most = max((len(rank.evaluations) for rank in seen.ranks), default=0)
    together = [
        [rank.evaluations[at] for rank in seen.ranks if at < len(rank.evaluations)]
        for at in range(most)
    ]
    return [ranks for ranks in together if all(one.is_finished for one in ranks)]


def _nothing(seen: TwoRuns, check: str) -> Finding:
    if all(rank.how == "ended" for rank in seen.ranks):
        return ok(check, "The program evaluates nothing.")
    return unknown(
        check,
        "No evaluation was seen before the program was stopped.",
        "Let it run longer: `--steps`.",
    )


def _partial(seen: TwoRuns) -> Finding:
    check = "evaluation-partial"
    evaluations = _evaluations(seen)
    if not evaluations:
        return _nothing(seen, check)
    for at, ranks in enumerate(evaluations):
        everything = {sample for one in ranks for sample in one.samples}
        largest = max(len(set(one.samples)) for one in ranks)
        of_one = _samples_of_one(seen, at)
        num_all = len(of_one | everything)
        if largest < num_all and not any(one.collectives for one in ranks):
            if not everything <= of_one:
                # What ranks compute there may be meant to differ, such as samples to look at.
                return unknown(
                    check, f"Evaluation {at}: ranks compute other samples than one rank does."
                )
            return wrong(
                check,
                f"Evaluation {at}: a rank sees {largest} of {num_all} samples, and ranks do not "
                f"put their results together.",
                "`all_reduce` sums and counts before dividing, or evaluate all of it on one rank.",
            )
    return ok(check, "Each evaluation covers the whole set, or ranks put their results together.")


def _samples_of_one(seen: TwoRuns, at: int) -> set[str]:
    if seen.one is None or at >= len(seen.one.evaluations):
        return set()
    return set(seen.one.evaluations[at].samples)


def _counts_twice(seen: TwoRuns) -> Finding:
    check = "evaluation-counts-twice"
    evaluations = _evaluations(seen)
    if not evaluations:
        return _nothing(seen, check)
    found = [_judge(check, at, ranks) for at, ranks in enumerate(evaluations)]
    for verdict in ("wrong", "unknown"):
        for finding in found:
            if finding.verdict == verdict:
                return finding
    return found[0]


def _judge(check: str, at: int, ranks: Sequence[EvaluationPass]) -> Finding:
    everything = {sample for one in ranks for sample in one.samples}
    total = sum(len(one.samples) for one in ranks)
    num_twice = total - len(everything)
    if not num_twice:
        return ok(check, f"Evaluation {at}: each of {total} samples is on one rank.")
    if all(set(one.samples) == everything for one in ranks):
        return ok(check, f"Evaluation {at}: every rank evaluates the whole set.")
    calls = [call for one in ranks for call in one.collectives]
    values = {value for call in calls for value in call.values}
    distinct = {float(len(everything)), float(len({s for one in ranks for s in one.seen}))}
    if values & distinct:
        return ok(
            check, f"Evaluation {at}: ranks count {len(everything)} samples, without repeats."
        )
    if not calls:
        return unknown(check, f"Evaluation {at}: ranks do not put their results together.")
    if any(call.name not in _SUMS for call in calls):
        return unknown(
            check,
            f"Evaluation {at}: {num_twice} samples are computed twice, as each rank is given "
            f"equally many; whether the program leaves the repeats out later cannot be seen.",
        )
    return wrong(
        check,
        f"Evaluation {at}: {num_twice} of {len(everything)} samples are computed twice, as each "
        f"rank is given equally many, and count twice in what ranks add up.",
        "Evaluate `indices[rank::world_size]` without padding, for example with "
        "`unisono.DistributedSampler(..., exact=True)`.",
    )


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
    return [found if finding.check == _MEAN_OF_MEANS else finding for finding in findings]


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
                    _MEAN_OF_MEANS,
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

"""Is the result of an evaluation that of the whole set, each sample counted once? Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.verify.findings import Finding, ok, unknown, wrong
from unisono.verify.rank_trace import EvaluationPass, TwoRuns

_SUMS = ("all_reduce", "reduce")


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

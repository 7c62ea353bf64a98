"""Does each sample count once, in an order that changes? Verdicts on training data. Pure.

Is the result of an evaluation that of the whole set, each sample counted once? Pure.

A mean over ranks of each rank's mean is not the mean over samples where ranks have different
numbers of them. Seen from outside: the numbers that ranks add up, weighted by their samples, are
what one rank has of all of them; as they are added up, they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unisono.tools.verify.findings import WRONG, Finding, in_order, ok, unknown, wrong
from unisono.tools.verify.trace import EvaluationPass, RankTrace, TwoRuns


def check_samples(seen: TwoRuns) -> list[Finding]:
    """Judge which samples ranks train with."""
    return [_samples_same(seen), _epoch_order(seen), _samples_lost(seen), _split(seen)]


def _samples_same(seen: TwoRuns) -> Finding:
    """Do ranks share the samples of a step, or compute the same ones?"""
    check = "samples-same-on-all-ranks"
    steps = [step for step in seen.steps() if all(rank.samples for rank in step)]
    if not steps:
        return unknown(check, "No forward pass of a whole model was seen on all ranks.")
    sets = [[set(rank.samples) for rank in step] for step in steps]
    if all(_are_equal(ranks) for ranks in sets):
        shown = len(sets[0][0])
        return wrong(
            check,
            f"In all {len(steps)} steps all ranks computed the same samples, {shown} in the first.",
        )
    for ranks, _ in seen.epochs("train"):
        plans = [set(one.plan or ()) for one in ranks]
        is_meant = ranks[0].replaces or ranks[0].is_sliced
        if not is_meant and len(plans[0]) > 1 and _are_equal(plans):
            return wrong(
                check,
                f"Every rank reads all {len(plans[0])} samples in each epoch, in an order of its "
                f"own, so each counts {seen.world_size} times.",
            )
    return ok(check, f"Ranks computed different samples in {len(steps)} steps.")


def _are_equal(sets: list[set[str]]) -> bool:
    return all(one == sets[0] for one in sets)


def _epoch_order(seen: TwoRuns) -> Finding:
    """Does a shuffled order change from epoch to epoch?"""
    check, is_seen = "epoch-order-fixed", False
    for number in sorted({i.loader for i in seen.ranks[0].iterations if i.role == "train"}):
        orders = [[i for i in rank.iterations if i.loader == number] for rank in seen.ranks]
        first = next(iter(orders[0]))
        if any(len(of_rank) < 2 or not of_rank[0].order for of_rank in orders):
            continue
        is_seen = True
        is_shuffled = not all(i.is_sorted for of_rank in orders for i in of_rank)
        is_fixed = all(of_rank[0].order == of_rank[1].order for of_rank in orders)
        is_meant = not first.has_set_epoch and not _changes_in_one(seen.one, number)
        if is_shuffled and is_fixed and not is_meant:
            return wrong(
                check,
                f"Loader {number} ({first.sampler}) gave the same shuffled order in epochs 0 and 1 "
                f"on all ranks.",
            )
    if is_seen or seen.ended:
        return ok(check, "No loader gave a shuffled order twice that changes on one rank.")
    return unknown(check, "No loader began a second epoch.", "Let it run longer with `--steps`.")


def _changes_in_one(one: RankTrace, number: int) -> bool:
    iterations = [i for i in one.iterations if i.loader == number]
    return len(iterations) > 1 and iterations[0].order != iterations[1].order


def _samples_lost(seen: TwoRuns) -> Finding:
    """Do all ranks together read as many samples as one?"""
    check, evidence = "samples-lost", ""
    for ranks, one in seen.epochs("train"):
        if one is not None and one.num_left < min(rank.num_left for rank in ranks):
            return wrong(
                check,
                f"Epoch {one.epoch} of loader {one.loader}: ranks leave out its last "
                f"{min(rank.num_left for rank in ranks)} batches, one rank {one.num_left}.",
                "Let the loop end when the loader does.",
            )
        plans = [rank.plan for rank in ranks if rank.plan is not None]
        if len(plans) < len(ranks) or one is None or one.plan is None:
            continue
        first, together, alone = ranks[0], set().union(*plans), set(one.plan)
        told = (
            f"Epoch {first.epoch} of loader {first.loader}: {seen.world_size} ranks read "
            f"{len(together)} samples, one rank {len(alone)}"
        )
        is_meant = first.replaces or first.drop_last
        if len(together) < len(alone) and not is_meant:
            return wrong(check, f"{told}: {len(alone) - len(together)} are left out.")
        evidence = f"{told}, as it is made to." if is_meant else f"{told}."
    if evidence:
        return ok(check, evidence)
    if seen.ended and seen.one.how == "ended":
        together = {row for rank in seen.ranks for step in rank.steps for row in step.rows}
        alone = {row for step in seen.one.steps for row in step.rows}
        if together and together < alone:
            told = f"ranks train with {len(together)} samples, one rank with {len(alone)}"
            return wrong(check, f"By the end {told}: {len(alone) - len(together)} are left out.")
        if together and together == alone:
            return ok(check, f"By the end ranks have trained with {len(together)}, as one rank.")
    return unknown(check, "Which samples an epoch has is not known: no DataLoader with a sampler.")


def _split(seen: TwoRuns) -> Finding:
    """Does a rank train with samples that another one validates with?"""
    check = "split-differs"
    trained = [_plans(rank, "train") for rank in seen.ranks]
    validated = [_plans(rank, "eval") for rank in seen.ranks]
    given = [{row for step in rank.steps for row in step.rows} for rank in seen.ranks]
    evaluated = [{row for one in rank.evaluations for row in one.rows} for rank in seen.ranks]
    if not any(trained) and not any(given):
        return unknown(check, "Which samples are trained with is not known.")
    for training, validation in ((trained, validated), (given, evaluated)):
        if any(t & v for t, v in zip(training, validation, strict=True)):
            break  # as it is meant to
        if leaked := set().union(*training) & set().union(*validation):
            return wrong(
                check,
                f"{len(leaked)} samples that one rank validates with are trained with on another: "
                f"the ranks have split the data differently.",
            )
    return ok(check, "No rank validates with samples that only another one trains with.")


def _plans(rank: RankTrace, role: str) -> set[str]:
    return {s for i in rank.iterations if i.role == role for s in i.plan or ()}


_SUMS = ("all_reduce", "reduce")
_ROUNDING = 1e-4  # parameters that were trained apart by rounding give other losses

Evaluation = tuple[int, Sequence[EvaluationPass], EvaluationPass | None]
"""Its number, and what the ranks that took part and one rank did."""


def check_evaluations(seen: TwoRuns) -> list[Finding]:
    """Judge every evaluation that was seen."""
    return [
        _worst(seen, "evaluation-partial", _partial),
        _worst(seen, "evaluation-counts-twice", _counts_twice),
    ]


def _evaluations(seen: TwoRuns) -> Iterator[Evaluation]:
    alone = seen.one.evaluations
    for at in range(max((len(rank.evaluations) for rank in seen.ranks), default=0)):
        ranks = [rank.evaluations[at] for rank in seen.ranks if at < len(rank.evaluations)]
        if all(one.is_finished for one in ranks):
            yield at, ranks, alone[at] if at < len(alone) else None


def _worst(seen: TwoRuns, check: str, judge: Callable[[str, Evaluation], Finding]) -> Finding:
    """Judge every evaluation; the worst verdict counts."""
    evaluations = list(_evaluations(seen))
    if not evaluations and seen.ended:
        return ok(check, "The program evaluates nothing.")
    if not evaluations:
        why = "No evaluation was seen before the program was stopped."
        return unknown(check, why, "Let it run longer: `--steps`.")
    return in_order(judge(check, evaluation) for evaluation in evaluations)[0]


def _partial(check: str, evaluation: Evaluation) -> Finding:
    at, ranks, one = evaluation
    everything = {sample for rank in ranks for sample in rank.samples}
    of_one = set() if one is None else set(one.samples)
    largest, num_all = max(len(set(rank.samples)) for rank in ranks), len(of_one | everything)
    is_joint = any(rank.collectives for rank in ranks)
    if is_joint and one is not None and one.is_finished and everything < of_one:
        return wrong(
            check,
            f"Evaluation {at}: all ranks together see {len(everything)} of {num_all} samples.",
            "Divide the set so that the last ranks get what is left, too.",
        )
    if largest == num_all or is_joint:
        told = "Each evaluation covers the whole set, or ranks put their results together."
        return ok(check, told)
    if not everything <= of_one:
        # What ranks compute there may be meant to differ, such as samples to look at.
        return unknown(check, f"Evaluation {at}: ranks compute other samples than one rank does.")
    return wrong(
        check,
        f"Evaluation {at}: a rank sees {largest} of {num_all} samples, and ranks do not put their "
        f"results together.",
    )


def _counts_twice(check: str, evaluation: Evaluation) -> Finding:
    at, ranks, _ = evaluation
    everything = {sample for rank in ranks for sample in rank.samples}
    total = sum(len(rank.samples) for rank in ranks)
    num_twice = total - len(everything)
    is_whole = all(set(rank.samples) == everything for rank in ranks)
    calls = [call for rank in ranks for call in rank.collectives]
    values = {value for call in calls for value in call.values}
    distinct = {float(len(everything)), float(len({s for rank in ranks for s in rank.seen}))}
    if not num_twice or is_whole or values & distinct:
        return ok(check, f"Evaluation {at}: each of {len(everything)} samples counts once.")
    if not calls:
        return unknown(check, f"Evaluation {at}: ranks do not put their results together.")
    told = (
        f"Evaluation {at}: {num_twice} of {len(everything)} samples are computed twice, as each "
        f"rank is given equally many"
    )
    only_sums = all(call.name in _SUMS for call in calls)
    if only_sums or all(_tell_sizes(rank, ranks) for rank in ranks):
        return wrong(check, f"{told}, and count twice in what ranks put together.")
    return unknown(check, f"{told}; whether repeats are left out later cannot be seen.")


def _tell_sizes(rank: EvaluationPass, ranks: Sequence[EvaluationPass]) -> bool:
    """Tell whether a rank gathers a few numbers of each, with that of its samples among them."""
    sizes = [float(len(one.seen)) for one in ranks]
    return any(
        call.name not in _SUMS
        and 0 < len(call.values) < sum(sizes)
        and len(call.values) % len(ranks) == 0
        and sizes in _columns(call.values, len(ranks))
        for call in rank.collectives
    )


def _columns(values: Sequence[float], num_ranks: int) -> list[list[float]]:
    """Give what ranks have told, each number of all ranks, from one rank after the other."""
    each = len(values) // num_ranks
    return [list(values[at::each]) for at in range(each)]


def with_means_of_evaluations(findings: Sequence[Finding], seen: TwoRuns) -> list[Finding]:
    """Put a mean of means in an evaluation in the place of the verdict on training.

    Where training differs, the ranks' numbers are no part of one rank's, so that none is found.
    """
    found = next(_means_of_means(seen), None)
    if found is None or WRONG in [finding.verdict for finding in findings]:
        return list(findings)
    return [found if finding.check == found.check else finding for finding in findings]


def _means_of_means(seen: TwoRuns) -> Iterator[Finding]:
    for at, ranks, one in _evaluations(seen):
        if one is None or len(ranks) < seen.world_size or not _are_comparable(ranks, one):
            continue
        sizes = [len(rank.rows) for rank in ranks]
        for given, joint, single in _numbers(ranks, one):
            if _is_mean_of_means(given, joint, single, sizes):
                yield wrong(
                    "mean-of-means",
                    f"Evaluation {at}: ranks have {_listed(sizes)} samples and means of "
                    f"{_listed([f'{mean:.6g}' for mean in given])}, which are averaged as if they "
                    f"had equally many; the mean over all samples is {single:.6g}.",
                    "Add up sums and numbers of samples (`all_reduce` both), and divide then.",
                )


def _are_comparable(ranks: Sequence[EvaluationPass], one: EvaluationPass) -> bool:
    """Tell whether ranks of different sizes computed together what one rank did, each once."""
    together = sorted(row for rank in ranks for row in rank.rows)
    have_sizes_of_their_own = len({len(rank.rows) for rank in ranks}) > 1
    return one.is_finished and have_sizes_of_their_own and together == sorted(one.rows)


def _numbers(
    ranks: Sequence[EvaluationPass], one: EvaluationPass
) -> Iterator[tuple[list[float], float, float]]:
    """Give what ranks add up, one number each; their sum or mean; and one rank's own number."""
    if len({len(rank.collectives) for rank in (*ranks, one)}) > 1:
        return
    for alone, *together in zip(*(rank.collectives for rank in (one, *ranks)), strict=True):
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

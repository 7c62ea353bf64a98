"""Does each sample count once, in training and evaluation, in an order that changes? Pure.

A mean over ranks of each rank's mean is not the mean over samples if ranks have different numbers
of samples. From outside it shows like this: the numbers that ranks add up equal one rank's number
for all samples if they are weighted by samples, but not as they are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from unisono.tools.verify.findings import (
    OK,
    WRONG,
    Finding,
    in_order,
    ok,
    other_end,
    unknown,
    wrong,
)
from unisono.tools.verify.trace import (
    Collective,
    EvaluationPass,
    Iteration,
    LoaderFacts,
    RankTrace,
    TwoRuns,
)


def check_samples(seen: TwoRuns) -> list[Finding]:
    """Return findings on the samples that ranks train with."""
    return [_samples_same(seen), _epoch_order(seen), _samples_lost(seen), _split(seen)]


def _samples_same(seen: TwoRuns) -> Finding:
    """Check that ranks divide the samples of a step instead of computing the same ones."""
    check = "samples-same-on-all-ranks"
    steps = [step for step in seen.steps() if all(rank.samples for rank in step)]
    if not steps:
        return unknown(check, "No forward pass of a whole model was seen on all ranks.")
    if all(len({frozenset(rank.samples) for rank in step}) == 1 for step in steps):
        told = f"In all {len(steps)} steps all ranks computed the same samples"
        return wrong(check, f"{told}, {len(set(steps[0][0].samples))} in the first.")
    for ranks, _ in seen.epochs("train"):
        first, *others = {frozenset(one.plan or ()) for one in ranks}
        if len(first) > 1 and not (others or ranks[0].replaces or ranks[0].is_sliced):
            return wrong(
                check,
                f"Every rank reads all {len(first)} samples in each epoch, in its own "
                f"order, so each counts {seen.world_size} times.",
            )
    return ok(check, f"Ranks computed different samples in {len(steps)} steps.")


def _epoch_order(seen: TwoRuns) -> Finding:
    """Check that a shuffled order changes from epoch to epoch."""
    check, is_seen = "epoch-order-fixed", False
    for number in sorted({i.loader for i in seen.ranks[0].of(Iteration) if i.role == "train"}):
        orders = [[i for i in rank.of(Iteration) if i.loader == number] for rank in seen.ranks]
        first = orders[0][0]
        if any(len(of_rank) < 2 or not of_rank[0].order for of_rank in orders):
            continue
        is_seen = True
        is_shuffled = not all(i.is_sorted for of_rank in orders for i in of_rank)
        is_fixed = all(of_rank[0].order == of_rank[1].order for of_rank in orders)
        of_one = [i.order for i in seen.one.of(Iteration) if i.loader == number][:2]
        is_meant = not first.has_set_epoch and len(set(of_one)) < 2
        if is_shuffled and is_fixed and not is_meant:
            return wrong(
                check,
                f"Loader {number} ({first.sampler}) gave the same shuffled order in epochs 0 and 1 "
                f"on all ranks.",
            )
    if is_seen or seen.ended:
        return ok(check, "No loader gave a shuffled order twice that changes on one rank.")
    return unknown(check, "No loader began a second epoch.", "Let it run longer with `--steps`.")


def _samples_lost(seen: TwoRuns) -> Finding:
    """Check that all ranks together read as many samples as one rank."""
    check, evidence = "samples-lost", ""
    for ranks, one in seen.epochs("train"):
        if one is None:
            continue
        first, where = ranks[0], f"Epoch {one.epoch} of loader {one.loader}"
        num_left = min(rank.num_left for rank in ranks)
        if one.num_left < num_left:
            told = f"{where}: ranks leave out its last {num_left} batches, one rank {one.num_left}."
            return wrong(check, told, "Let the loop end when the loader does.")
        counts = [rank.num_batches for rank in ranks if rank.num_batches is not None]
        if len(set(counts)) > 1 and len(counts) == len(ranks):
            told = f"{where} has {' and '.join(map(str, counts))} batches on different ranks"
            remedy = "Give all ranks equally many, as a DistributedSampler does."
            if _agree_on_fewest(seen, counts):
                return wrong(
                    check, f"{told}, which agree on the fewest: the others' are lost.", remedy
                )
            return unknown(check, f"{told}; whether all are trained with cannot be seen.", remedy)
        plans = [rank.plan for rank in ranks if rank.plan is not None]
        if len(plans) < len(ranks) or one.plan is None:
            continue
        together, alone = set().union(*plans), set(one.plan)
        told = (
            f"{where}: {seen.world_size} ranks read {len(together)} samples, one rank {len(alone)}"
        )
        is_meant = first.replaces or first.drop_last
        if len(together) < len(alone) and not is_meant:
            return wrong(check, f"{told}: {len(alone) - len(together)} are left out.")
        evidence = f"{told}, as intended." if is_meant else f"{told}."
    if evidence:
        return ok(check, evidence)
    if seen.ended and seen.one.how == "ended":
        together, alone = set().union(*(rank.rows for rank in seen.ranks)), seen.one.rows
        if together and together < alone:
            told = f"ranks train with {len(together)} samples, one rank with {len(alone)}"
            return wrong(check, f"By the end {told}: {len(alone) - len(together)} are left out.")
        if together and together == alone:
            return ok(check, f"By the end ranks have trained with {len(together)}, as one rank.")
    if (given := seen.rows_of_an_epoch()) is not None:
        together, alone = set().union(*given), seen.one.rows
        if together and together < alone:
            told = f"ranks train again with the same {len(together)} samples, one rank with more"
            remedy = "Let ranks share what is left over, or give each rank parts of one size."
            return wrong(check, f"In their second epoch {told}, {len(alone)} so far.", remedy)
    return unknown(check, "Which samples an epoch has is not known: no DataLoader with a sampler.")


def _agree_on_fewest(seen: TwoRuns, counts: Sequence[int]) -> bool:
    """Return whether ranks put these numbers together, one of each, or take the least of them."""
    of_ranks = ([call for call in rank.of(Collective) if call.values] for rank in seen.ranks)
    for calls in zip(*of_ranks, strict=False):
        if all(sorted(call.values) == sorted(counts) for call in calls):
            return True
        given = [list(call.given) for call in calls]
        if given == [[n] for n in counts] and {*calls[0].values} == {min(counts)}:
            return True
    return False


def _split(seen: TwoRuns) -> Finding:
    """Check that no rank trains with samples that another one validates with."""
    check = "split-differs"
    trained = [_plans(rank, "train") for rank in seen.ranks]
    validated = [_plans(rank, "eval") for rank in seen.ranks]
    given = [rank.rows for rank in seen.ranks]
    evaluated = [{row for e in rank.of(EvaluationPass) for row in e.rows} for rank in seen.ranks]
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
    return {s for i in rank.of(Iteration) if i.role == role for s in i.plan or ()}


_SUMS = ("all_reduce", "reduce")
_ROUNDING = 1e-4  # parameters that differ by rounding give other losses

Evaluation = tuple[int, Sequence[EvaluationPass], EvaluationPass | None]
"""The number of an evaluation, the passes of the ranks that took part, and that of one rank."""


def check_evaluations(seen: TwoRuns) -> list[Finding]:
    """Return findings on every evaluation."""
    return [
        _worst(seen, "evaluation-partial", _partial),
        _worst(seen, "evaluation-counts-twice", _counts_twice),
    ]


def _evaluations(seen: TwoRuns) -> Iterator[Evaluation]:
    of_runs = (rank.of(EvaluationPass) for rank in (seen.one, *seen.ranks))
    for at, (one, *found) in enumerate(zip_longest(*of_runs)):
        ranks = [rank for rank in found if rank is not None]
        if ranks and all(rank.is_finished for rank in ranks):
            yield at, ranks, one


def _worst(seen: TwoRuns, check: str, judge: Callable[[str, Evaluation], Finding]) -> Finding:
    if found := [judge(check, evaluation) for evaluation in _evaluations(seen)]:
        return in_order(found)[0]
    if seen.ended:
        return ok(check, "The program evaluates nothing.")
    num_epochs = min(sum(i.role == "train" for i in rank.of(Iteration)) for rank in seen.ranks)
    if num_epochs > 1 and not any(map(_has_idle_loader, seen.ranks)):
        told = f"No evaluation came between {num_epochs} epochs, and no loader waits for one."
        return ok(check, told)
    why = "No evaluation was seen before the program was stopped."
    return unknown(check, why, "Let it run longer: `--steps`.")


def _has_idle_loader(rank: RankTrace) -> bool:
    """Return whether nothing was read from one of its loaders."""
    used = {iteration.loader for iteration in rank.of(Iteration)}
    return any(loader.number not in used for loader in rank.of(LoaderFacts))


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
            "Divide the set so that the last ranks also get what is left.",
        )
    if largest == num_all or is_joint:
        told = "Each evaluation covers the whole set, or ranks put their results together."
        return ok(check, told)
    if not everything <= of_one:
        # What ranks compute there may differ on purpose, such as samples to look at.
        return unknown(check, f"Evaluation {at}: ranks compute other samples than one rank does.")
    return wrong(
        check,
        f"Evaluation {at}: a rank sees {largest} of {num_all} samples, and ranks do not put their "
        f"results together.",
    )


def _counts_twice(check: str, evaluation: Evaluation) -> Finding:
    at, ranks, one = evaluation
    everything = {sample for rank in ranks for sample in rank.samples}
    num_twice = sum(len(rank.samples) for rank in ranks) - len(everything)
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
    if only_sums or all(_tells_sizes(rank, ranks) for rank in ranks):
        return wrong(check, f"{told}, and count twice in what ranks put together.")
    is_whole = sum(len(rank.seen) for rank in ranks) == len(everything) + num_twice
    of_one = () if one is None or not is_whole else one.printed
    for here, there in zip(ranks[0].printed, of_one, strict=False):
        if here == there:  # otherwise it is of rank 0's part, like its loss
            once, twice = (_is_share(here, len(everything) + more) for more in (0, num_twice))
            if twice and not once:
                shown = f"{here} is a share of {len(everything) + num_twice}"
                return wrong(check, f"{told}, and count twice in what is printed: {shown}.")
            if once and not twice:
                return ok(check, f"{told}; {here}, which is printed, counts each once.")
    return unknown(check, f"{told}; whether repeats are left out later cannot be seen.")


_EXACT, _SURE = 1e-6, 0.03


def _is_share(text: str, count: int) -> bool:
    """Return whether a printed number is a fraction of `count`, or a percentage; not 0 or all."""
    digits = 0.5 * 10.0 ** -len(text.partition(".")[2])
    for whole in (1.0, 100.0):
        parts = float(text) / whole * count
        tolerated = max(digits, _EXACT) / whole * count
        is_whole = abs(parts - round(parts)) <= tolerated < _SURE
        if is_whole and 0 < round(parts) < count:
            return True
    return False


def _tells_sizes(rank: EvaluationPass, ranks: Sequence[EvaluationPass]) -> bool:
    """Return whether a rank gathers a few numbers of each rank, with its number of samples."""
    sizes = [len(one.seen) for one in ranks]
    few = [c.values for c in rank.collectives if c.name not in _SUMS and len(c.values) < sum(sizes)]
    return any(
        list(values[at :: len(values) // len(ranks)]) == sizes
        for values in few
        for at in range(len(values) // len(ranks))
    )


def with_means_of_evaluations(findings: Sequence[Finding], seen: TwoRuns) -> list[Finding]:
    """Replace the verdict on training by a mean of means in an evaluation, if there is one.

    If training differs, the ranks' numbers are not parts of one rank's, so none is found.
    """
    found = next(_means_of_means(seen), None)
    if found is None or WRONG in [finding.verdict for finding in findings]:
        return list(findings)
    return [found if finding.check == found.check else finding for finding in findings]


def with_numbers_of_steps(findings: Sequence[Finding], seen: TwoRuns) -> list[Finding]:
    """Replace the verdict on samples if nothing differs but the number of steps."""
    ranks, alone = min(rank.num_steps for rank in seen.ranks), seen.one.num_steps
    is_other = (seen.ended and ranks < alone) or (seen.one.how == "ended" and alone < ranks)
    if not is_other or {finding.verdict for finding in findings} != {OK}:
        return list(findings)
    found = other_end(seen.world_size, ranks, alone)
    return [found if finding.check == found.check else finding for finding in findings]


def _means_of_means(seen: TwoRuns) -> Iterator[Finding]:
    for at, ranks, one in _evaluations(seen):
        sizes = [len(rank.rows) for rank in ranks]
        together = sorted(row for rank in ranks for row in rank.rows)
        if one is None or not one.is_finished or together != sorted(one.rows):
            continue
        if len(ranks) < seen.world_size or len(set(sizes)) == 1:
            continue
        for given, joint, single in _numbers(ranks, one):
            if _is_mean_of_means(given, joint, single, sizes):
                means = " and ".join(f"{mean:.6g}" for mean in given)
                yield wrong(
                    "mean-of-means",
                    f"Evaluation {at}: ranks have {' and '.join(map(str, sizes))} samples and "
                    f"means of {means}, which are averaged as if they had equally many; the mean "
                    f"over all samples is {single:.6g}.",
                    "Add up sums and numbers of samples (`all_reduce` both), and divide then.",
                )


def _numbers(
    ranks: Sequence[EvaluationPass], one: EvaluationPass
) -> Iterator[tuple[list[float], float, float]]:
    """Yield one number of each rank that is added up; their sum or mean; and one rank's number."""
    if len({len(rank.collectives) for rank in (*ranks, one)}) > 1:
        return
    for calls in zip(*(rank.collectives for rank in (one, *ranks)), strict=True):
        shapes = {(call.name, len(call.given), len(call.values)) for call in calls}
        if len(shapes) == 1 and calls[0].name in _SUMS:
            columns = zip(*(call.given for call in calls), strict=True)
            for (single, *given), joint in zip(columns, calls[1].values, strict=False):
                yield given, joint, single


def _is_mean_of_means(
    given: Sequence[float], joint: float, single: float, sizes: Sequence[int]
) -> bool:
    """Return whether ranks average their means, and the mean over samples differs."""
    total, mean = sum(given), sum(given) / len(given)
    weighted = sum(value * size for value, size in zip(given, sizes, strict=True)) / sum(sizes)
    tolerated = _ROUNDING * max(map(abs, (*given, single)))
    is_joint = min(abs(joint - total), abs(joint - mean)) <= tolerated
    return is_joint and abs(weighted - single) <= tolerated < abs(mean - single)

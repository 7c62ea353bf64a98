"""Does each sample count once, in an order that changes? Verdicts on training data. Pure."""

from __future__ import annotations

from unisono.verdicts import Finding
from unisono.verify.findings import ok, unknown, wrong
from unisono.verify.trace import RankTrace, TwoRuns


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
    num_common = sum(len(set.intersection(*ranks)) for ranks in sets)
    shared = "none is on two ranks" if not num_common else f"{num_common} were on all ranks"
    return ok(check, f"Ranks computed different samples in {len(steps)} steps; {shared}.")


def _are_equal(sets: list[set[str]]) -> bool:
    return all(one == sets[0] for one in sets)


def _epoch_order(seen: TwoRuns) -> Finding:
    """Does a shuffled order change from epoch to epoch?"""
    check = "epoch-order-fixed"
    unshuffled = changed = ""
    for number in sorted({i.loader for i in seen.ranks[0].iterations if i.role == "train"}):
        orders = [[i for i in rank.iterations if i.loader == number] for rank in seen.ranks]
        first = next(iter(orders[0]))
        if any(len(of_rank) < 2 or not of_rank[0].order for of_rank in orders):
            continue
        if all(i.is_sorted for of_rank in orders for i in of_rank):
            unshuffled = f"Loader {number} does not shuffle."
        elif not all(of_rank[0].order == of_rank[1].order for of_rank in orders):
            changed = f"Loader {number} has another order in its second epoch."
        elif first.has_set_epoch or _changes_in_one(seen.one, number):
            return wrong(
                check,
                f"Loader {number} ({first.sampler}) gave the same shuffled order in epochs 0 and 1 "
                f"on all ranks.",
            )
        else:
            unshuffled = (
                f"Loader {number} has one order of its own in all epochs, on one rank, too."
            )
    if changed or unshuffled or seen.ended:
        return ok(check, changed or unshuffled or "No loader is used for two epochs.")
    return unknown(check, "No loader began a second epoch.", "Let it run longer with `--steps`.")


def _changes_in_one(one: RankTrace | None, number: int) -> bool:
    iterations = [] if one is None else [i for i in one.iterations if i.loader == number]
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
        if first.replaces:
            evidence = f"{told}; they are drawn with replacement."
        elif len(together) >= len(alone):
            evidence = f"{told}."
        elif first.drop_last:
            evidence = f"{told}, as `drop_last=True` asks for."
        else:
            return wrong(check, f"{told}: {len(alone) - len(together)} are left out.")
    if evidence:
        return ok(check, evidence)
    if seen.one is not None and seen.ended and seen.one.how == "ended":
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
    if not any(validated) and not any(evaluated):
        return ok(check, "Nothing is used for validation alone.")
    for training, validation in ((trained, validated), (given, evaluated)):
        if any(t & v for t, v in zip(training, validation, strict=True)):
            return ok(check, "Each rank validates with samples that it trains with, too.")
        if leaked := set().union(*training) & set().union(*validation):
            return wrong(
                check,
                f"{len(leaked)} samples that one rank validates with are trained with on another: "
                f"the ranks have split the data differently.",
            )
    return ok(check, "No rank validates with a sample that any rank trains with.")


def _plans(rank: RankTrace, role: str) -> set[str]:
    return {s for i in rank.iterations if i.role == role for s in i.plan or ()}

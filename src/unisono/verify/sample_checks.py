"""Does each sample count once, in an order that changes? Verdicts on training data. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.verify.findings import Finding, ok, unknown, wrong
from unisono.verify.rank_trace import Iteration, RankTrace, TwoRuns

_SAMPLER = "Give the DataLoader a `DistributedSampler` (and `shuffle=False`)"


def check_samples(seen: TwoRuns) -> list[Finding]:
    """Judge which samples ranks train with."""
    return [
        _samples_same(seen),
        _epoch_order(seen),
        _samples_lost(seen),
        _split(seen),
    ]


def _samples_same(seen: TwoRuns) -> Finding:
    """Do ranks share the samples of a step, or compute the same ones?"""
    check = "samples-same-on-all-ranks"
    steps = [step for step in seen.steps() if all(rank.samples for rank in step)]
    remedy = f"{_SAMPLER}, or take every N-th sample by rank."
    if not steps:
        return unknown(check, "No forward pass of a whole model was seen on all ranks.")
    sets = [[set(rank.samples) for rank in step] for step in steps]
    same = [all(s == ranks[0] for s in ranks) for ranks in sets]
    if all(same):
        shown = len(sets[0][0])
        return wrong(
            check,
            f"In all {len(steps)} steps all ranks computed the same samples, {shown} in the first.",
            remedy,
        )
    if (loader := _read_whole_by_all(seen)) is not None:
        return wrong(
            check,
            f"Every rank reads all {len(set(loader.plan or ()))} samples in each epoch, in an "
            f"order of its own, so each counts {seen.world_size} times.",
            remedy,
        )
    num_common = sum(len(set.intersection(*ranks)) for ranks in sets)
    shared = "none is on two ranks" if not num_common else f"{num_common} were on all ranks"
    return ok(check, f"Ranks computed different samples in {len(steps)} steps; {shared}.")


def _read_whole_by_all(seen: TwoRuns) -> Iteration | None:
    """Find an epoch in which each rank read everything that any rank read."""
    for place in _places(seen, "train"):
        iterations = [_at(rank, place) for rank in seen.ranks]
        plans = [set(one.plan or ()) for one in iterations if one is not None]
        first = iterations[0]
        if first is None or len(plans) < seen.world_size or first.replaces or first.is_sliced:
            continue
        if len(plans[0]) > 1 and all(plan == plans[0] for plan in plans):
            return first
    return None


def _epoch_order(seen: TwoRuns) -> Finding:
    """Does a shuffled order change from epoch to epoch?"""
    check = "epoch-order-fixed"
    unshuffled = ""
    changed = ""
    for number in sorted({i.loader for i in seen.ranks[0].iterations if i.role == "train"}):
        orders = [[i for i in rank.iterations if i.loader == number] for rank in seen.ranks]
        if any(len(of_rank) < 2 or not of_rank[0].order for of_rank in orders):
            continue
        if all(i.is_sorted for of_rank in orders for i in of_rank):
            unshuffled = f"Loader {number} does not shuffle."
            continue
        if not all(of_rank[0].order == of_rank[1].order for of_rank in orders):
            changed = f"Loader {number} has another order in its second epoch."
            continue
        first = orders[0][0]
        if first.has_set_epoch or _changes_in_one(seen.one, number):
            return wrong(
                check,
                f"Loader {number} ({first.sampler}) gave the same shuffled order in epochs 0 and 1 "
                f"on all ranks.",
                "Call `sampler.set_epoch(epoch)` at the beginning of each epoch.",
            )
        unshuffled = f"Loader {number} has one order of its own in all epochs, on one rank, too."
    if changed or unshuffled:
        return ok(check, changed or unshuffled)
    if all(rank.how == "ended" for rank in seen.ranks):
        return ok(check, "No loader is used for two epochs.")
    return unknown(check, "No loader began a second epoch.", "Let it run longer with `--steps`.")


def _changes_in_one(one: RankTrace | None, number: int) -> bool:
    iterations = [] if one is None else [i for i in one.iterations if i.loader == number]
    return len(iterations) > 1 and iterations[0].order != iterations[1].order


def _samples_lost(seen: TwoRuns) -> Finding:
    """Do all ranks together read as many samples as one?"""
    check = "samples-lost"
    evidence = ""
    for place in _places(seen, "train"):
        iterations = [_at(rank, place) for rank in seen.ranks]
        one = None if seen.one is None else _at(seen.one, place)
        plans = [i.plan for i in iterations if i is not None and i.plan is not None]
        if len(plans) < seen.world_size or one is None or one.plan is None:
            continue
        first = iterations[0]
        assert first is not None
        together, alone = {s for plan in plans for s in plan}, set(one.plan)
        told = (
            f"Epoch {place[1]} of loader {place[0]}: {seen.world_size} ranks read "
            f"{len(together)} samples, one rank {len(alone)}"
        )
        if first.replaces:
            evidence = f"{told}; they are drawn with replacement."
        elif len(together) >= len(alone):
            evidence = f"{told}."
        elif first.drop_last:
            evidence = f"{told}, as `drop_last=True` asks for."
        else:
            return wrong(
                check,
                f"{told}: {len(alone) - len(together)} are left out.",
                "Spread the remainder: take `indices[rank::world_size]` instead of equal blocks "
                "rounded down, or use a `DistributedSampler`.",
            )
    if evidence:
        return ok(check, evidence)
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
                "Split with a fixed seed that is the same on all ranks, for example "
                "`random_split(..., generator=torch.Generator().manual_seed(0))`.",
            )
    return ok(check, "No rank validates with a sample that any rank trains with.")


def _plans(rank: RankTrace, role: str) -> set[str]:
    return {s for i in rank.iterations if i.role == role for s in i.plan or ()}


def _places(seen: TwoRuns, role: str) -> Sequence[tuple[int, int]]:
    return [(i.loader, i.epoch) for i in seen.ranks[0].iterations if i.role == role]


def _at(rank: RankTrace, place: tuple[int, int]) -> Iteration | None:
    return next((i for i in rank.iterations if (i.loader, i.epoch) == place), None)

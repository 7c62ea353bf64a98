"""Which steps are audited, who computes whose shards again, and who is wrong? Pure decisions.

In an audited step each worker computes the shards of the next one again::

    first     rank 0 computes shards of rank 1, rank 1 those of rank 2, rank 2 those of rank 0
    equal?    the step goes on
    else      everybody computes the disputed parts once more: most workers are right

An opinion is what one worker found one time, as digests by name. What the most workers have found
counts; where two findings have equally many workers, what was found most often: whoever computes
correctly finds the same again. Nobody is accused where that does not decide.

On several hosts, workers of one use the same memory, so what all of them keep counts once: a host
with many workers does not outvote another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

SHARE_OF_TIME = 0.01  # for audits

Digests = Mapping[str, str]
"""Of what was computed or kept, by its name."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one worker found, one time."""

    rank: int
    digests: Digests


Ruling = Literal["agreed", "wrong", "undecided", "unrepeatable"]
"""What follows from several opinions: all found the same; some workers are wrong; it cannot be told
which are; or everybody who computed the same twice has found something else the second time."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from several opinions."""

    ruling: Ruling  # in one word
    # the workers that were wrong at least once; empty where that is not known
    wrong: tuple[int, ...] = ()
    names: tuple[str, ...] = ()  # what the opinions differ in, in their order
    is_of_hosts: bool = False  # all workers of some hosts were, and all of them alike


def judge(opinions: Sequence[Opinion]) -> Judgement:
    """Say who is wrong.

    Args:
        opinions: at least one; several of the same worker where it computed several times.
    """
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for opinion in opinions:
        found.setdefault(tuple(sorted(opinion.digests.items())), []).append(opinion.rank)
    if len(found) == 1:
        return Judgement("agreed")
    names = _differing([opinion.digests for opinion in opinions])
    weights = {value: (len(set(ranks)), len(ranks)) for value, ranks in found.items()}
    best = max(weights.values())
    winners = [value for value, weight in weights.items() if weight == best]
    if len(winners) == 1 and best > (1, 1):
        others = {rank for value, ranks in found.items() if value != winners[0] for rank in ranks}
        return Judgement("wrong", tuple(sorted(others)), names)
    ranks = [opinion.rank for opinion in opinions]
    repeating = {rank for rank in ranks if ranks.count(rank) > 1}
    fickle = {r for r in repeating if sum(r in those for those in found.values()) > 1}
    is_program = bool(repeating) and fickle == repeating
    return Judgement("unrepeatable" if is_program else "undecided", names=names)


def judge_kept(
    now: Sequence[Opinion], before: Sequence[Opinion] = (), reference: Digests | None = None
) -> Judgement:
    """Say who keeps something else than the others.

    Args:
        now: what each worker keeps.
        before: what each kept at the same step, when it was not known who was wrong; the steps
            have come again since.
        reference: what all kept at the end of the step before, where nothing has changed it since.

    Returns:
        Where all keep the same now, those are wrong that kept something else before. If all did,
        as one worker's wrong parameters led to wrong gradients for all, nobody is accused.
    """
    judgement = judge(now)
    if judgement.ruling == "agreed":
        return _judge_past(now[0].digests, before)
    if judgement.ruling == "wrong":
        return judgement
    if reference is not None and any(opinion.digests == reference for opinion in now):
        wrong = {opinion.rank for opinion in now if opinion.digests != reference}
        return Judgement("wrong", tuple(sorted(wrong)), judgement.names)
    return judge([*before, *now])


def judge_hosts(
    now: Sequence[Opinion],
    before: Sequence[Opinion],
    reference: Digests | None,
    hosts: Sequence[Sequence[int]],
) -> Judgement:
    """Do as :func:`judge_kept` where workers are on several hosts.

    Args:
        now, before, reference: as there.
        hosts: the workers of each; `now`, and `before` where there is any, have all of them.
    """
    names = _alike(now, hosts) & _alike(before or now, hosts)
    told = None if reference is None else _among(reference, names)
    firsts = [_of_hosts(opinions, hosts, names) for opinions in (now, before)]
    judgement = judge_kept(firsts[0], firsts[1], told)
    if judgement.ruling == "agreed":
        return judge_kept(now, before, reference)
    wrong = {rank for ranks in hosts if ranks[0] in judgement.wrong for rank in ranks}
    return replace(judgement, wrong=tuple(sorted(wrong)), is_of_hosts=True)


def _alike(opinions: Sequence[Opinion], hosts: Sequence[Sequence[int]]) -> set[str]:
    """Name what the workers of each host all keep alike."""
    of_rank = {opinion.rank: opinion.digests for opinion in opinions}
    kept = [[of_rank[rank] for rank in ranks] for ranks in hosts]
    names = {name for opinion in opinions for name in opinion.digests}
    return {
        name
        for name in names
        if all(len({digests.get(name) for digests in of_host}) == 1 for of_host in kept)
    }


def _of_hosts(
    opinions: Sequence[Opinion], hosts: Sequence[Sequence[int]], names: Collection[str]
) -> list[Opinion]:
    """Have the first worker of each host speak for all, of some names."""
    firsts = {ranks[0] for ranks in hosts}
    return [Opinion(o.rank, _among(o.digests, names)) for o in opinions if o.rank in firsts]


def _among(digests: Digests, names: Collection[str]) -> Digests:
    return {name: digest for name, digest in digests.items() if name in names}


def _judge_past(right: Digests, before: Sequence[Opinion]) -> Judgement:
    wrong = {opinion.rank for opinion in before if opinion.digests != right}
    if not wrong or not {opinion.rank for opinion in before} - wrong:
        return Judgement("agreed")
    names = _differing([right, *(opinion.digests for opinion in before)])
    return Judgement("wrong", tuple(sorted(wrong)), names)


def checked_by(position: int, num_workers: int) -> int:
    """Give the position of the worker whose shards the one at `position` computes again."""
    return (position + 1) % num_workers


def is_audited(step: int, every: int, end_step: int) -> bool:
    """Tell whether a step closes an interval of `every` steps, or is the last one.

    Args:
        step: counted from 0 over the whole run.
        every: `audit_every`.
        end_step: the steps that the run will have done when the loop ends.
    """
    return (step + 1) % every == 0 or step + 1 == end_step


def interval_for(audit_s: float, step_s: float) -> int:
    """Give the smallest `audit_every` with which audits take at most that share of the time.

    Args:
        audit_s: what an audit adds to a step, in seconds.
        step_s: what a step takes without, in seconds.
    """
    return max(1, -int(-audit_s // (SHARE_OF_TIME * step_s)))


def _differing(many: Sequence[Digests]) -> tuple[str, ...]:
    names = dict.fromkeys(name for digests in many for name in digests)
    return tuple(name for name in names if len({digests.get(name) for digests in many}) > 1)

"""Which steps are audited, who computes whose shards again, and who is wrong? Pure decisions.

In an audited step each worker computes the shards of the next one again::

    first     rank 0 computes shards of rank 1, rank 1 those of rank 2, rank 2 those of rank 0
    equal?    the step goes on
    else      everybody computes the disputed parts once more: most workers are right

An opinion is what one worker found one time, as digests by name. What the most workers have found
counts; where two findings have equally many workers, what was found most often: whoever computes
correctly finds the same again. Nobody is accused where that does not decide.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHARE_OF_TIME = 0.01

Digests = Mapping[str, str]
"""Of what was computed or kept, by its name."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one worker found, one time."""

    rank: int
    digests: Digests


class Finding(enum.Enum):
    """What follows from several opinions.

    AGREED: all found the same.
    WRONG: some workers are wrong, and it is known which.
    UNDECIDED: some worker is wrong, but it cannot be told which.
    UNREPEATABLE: everybody who computed the same twice has found something else the second time.
    """

    AGREED = "agreed"
    WRONG = "wrong"
    UNDECIDED = "undecided"
    UNREPEATABLE = "unrepeatable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from several opinions.

    Attributes:
        finding: in one word.
        wrong: the workers that were wrong at least once; empty where that is not known.
        names: what the opinions differ in, in their order.
    """

    finding: Finding
    wrong: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


def judge(opinions: Sequence[Opinion]) -> Verdict:
    """Say who is wrong.

    Args:
        opinions: at least one; several of the same worker where it computed several times.
    """
    found: defaultdict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    for opinion in opinions:
        found[tuple(sorted(opinion.digests.items()))].append(opinion.rank)
    if len(found) == 1:
        return Verdict(Finding.AGREED)
    names = _differing([opinion.digests for opinion in opinions])
    weights = {value: (len(set(ranks)), len(ranks)) for value, ranks in found.items()}
    best = max(weights.values())
    winners = [value for value, weight in weights.items() if weight == best]
    if len(winners) == 1 and best > (1, 1):
        others = {rank for value, ranks in found.items() if value != winners[0] for rank in ranks}
        return Verdict(Finding.WRONG, tuple(sorted(others)), names)
    repeats = [rank for rank, count in Counter(o.rank for o in opinions).items() if count > 1]
    is_fickle = {rank: sum(rank in ranks for ranks in found.values()) > 1 for rank in repeats}
    nobody_repeats = bool(repeats) and all(is_fickle.values())
    return Verdict(Finding.UNREPEATABLE if nobody_repeats else Finding.UNDECIDED, names=names)


def judge_kept(
    now: Sequence[Opinion], before: Sequence[Opinion] = (), reference: Digests | None = None
) -> Verdict:
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
    verdict = judge(now)
    if verdict.finding is Finding.AGREED:
        return _judge_past(now[0].digests, before)
    if verdict.finding is Finding.WRONG:
        return verdict
    if reference is not None and any(opinion.digests == reference for opinion in now):
        wrong = {opinion.rank for opinion in now if opinion.digests != reference}
        return Verdict(Finding.WRONG, tuple(sorted(wrong)), verdict.names)
    return judge([*before, *now])


def _judge_past(right: Digests, before: Sequence[Opinion]) -> Verdict:
    wrong = {opinion.rank for opinion in before if opinion.digests != right}
    if not before or not {opinion.rank for opinion in before} - wrong:
        return Verdict(Finding.AGREED)
    names = _differing([right, *(opinion.digests for opinion in before)])
    return Verdict(Finding.WRONG, tuple(sorted(wrong)), names)


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


def interval_for(audit_s: float, step_s: float, share: float = SHARE_OF_TIME) -> int:
    """Give the smallest `audit_every` with which audits take at most a share of the time.

    Args:
        audit_s: what an audit adds to a step, in seconds.
        step_s: what a step takes without, in seconds.
        share: of the time.
    """
    return max(1, math.ceil(audit_s / (share * step_s)))


def _differing(many: Sequence[Digests]) -> tuple[str, ...]:
    names = dict.fromkeys(name for digests in many for name in digests)
    return tuple(name for name in names if len({digests.get(name) for digests in many}) > 1)

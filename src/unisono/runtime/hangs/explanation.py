"""Explains a wait in one message: who is late, where it is, and who waits for it. Pure.

Step 57 has been waiting for 4 s. Rank 2 has not arrived at the sum of gradients: it is in
`load_image`, train.py:88 (loading sample 10432). Ranks 0, 1 and 3 wait for it.
  rank 2, process 4711:
    load_image  train.py:88
    …

A wait is too long after max(3 s, 10 × the median of steps, or else of earlier waits). Each further
message comes when the wait has become twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.runtime.hangs.stacks import folded
from unisono.runtime.hangs.whereabouts import (
    ProcessState,
    RankState,
    Whereabouts,
    is_stuck,
    loader_part,
    place_in_words,
    whereabouts,
)
from unisono.runtime.notices import duration, listed
from unisono.runtime.workers.launcher_messages import IN_INIT

_STACKS_AT_MOST = 4
_SAME_CALLS = (
    "Every rank must make the same calls in the same order, with tensors of one shape and dtype."
)


@dataclass(frozen=True, slots=True)
class Hang:
    """What is known about a wait."""

    waited_s: float | None = None  # how long it has lasted, in seconds; None if it was not watched
    # the median time of a step, in seconds; None if unknown
    usual_s: float | None = None
    folder: str = ""  # paths below it are shown relative to it
    missing: tuple[int, ...] = ()  # ranks that have ended


def explain(looks: Sequence[RankState], hang: Hang) -> str:
    """Describe which rank delays which, and where; empty if no rank waits and no step runs."""
    here = {look.rank: whereabouts(look) for look in looks}
    waiting = [place for place in here.values() if place.name]
    late = [look for look in looks if not here[look.rank].name]
    late = _awaited(late, looks, waiting)
    if not waiting and not any(look.step is not None for look in looks):
        return ""
    if not late and not hang.missing:
        return _mismatch(looks, waiting, hang)
    sentences = [_opening(waiting, looks, hang), *_late(late, waiting, hang.missing)]
    if waiting:
        ranks = [place.rank for place in waiting]
        wait = "waits" if len(ranks) == 1 else "wait"
        them = "it" if len(late) + len(hang.missing) == 1 else "them"
        sentences.append(f"{listed('Rank', ranks, ' and ')} {wait} for {them}{_sites(waiting)}.")
    return "\n".join([" ".join(sentences), *_details(late, hang)])


def _awaited(
    late: list[RankState], looks: Sequence[RankState], waiting: Sequence[Whereabouts]
) -> list[RankState]:
    """Drop ranks that no rank waits for: not in the membership, nor in a call's group."""
    if any(look.meeting for look in looks):
        return [look for look in late if look.is_behind] or late
    if waiting and all(place.peers for place in waiting):
        peers = frozenset[int]().union(*(place.peers for place in waiting))
        return [look for look in late if look.rank in peers]
    return late


def describe(looks: Sequence[RankState], hang: Hang) -> str:
    """Describe where each rank is, even if nothing is wrong."""
    lines = []
    for look in looks:
        place = whereabouts(look)
        step = "" if look.step is None else f", step {look.step}"
        if place.name:
            words = f"waits for others in {place.sight}"
        else:
            words = place_in_words(look.process, look.children)
        lines.append(f"rank {look.rank} (process {look.process.pid}{step}) {words}")
        lines += _details([look], hang, is_titled=False)
    return "\n".join(lines)


def _opening(waiting: Sequence[Whereabouts], looks: Sequence[RankState], hang: Hang) -> str:
    steps = [look.step for look in looks if look.step is not None]
    purposes = " ".join(look.meeting for look in looks)
    if any(place.name == IN_INIT for place in waiting):
        what = f"`{IN_INIT}`"
    elif not all(place.is_meeting for place in waiting):
        what = "A collective of torch.distributed"
    elif steps and (not waiting or "step" in purposes):
        what = f"Step {max(steps)}"
    else:
        what = f"`{waiting[0].name}`" if waiting else "The program"
    if hang.waited_s is None:
        return f"{what} waits." if waiting else f"{what} is under way."
    usual = "" if hang.usual_s is None else f" (usually {duration(hang.usual_s)})"
    if waiting:
        return f"{what} has been waiting for {hang.waited_s:.0f} s."
    return f"{what} has taken {hang.waited_s:.0f} s{usual}."


def _late(
    late: Sequence[RankState], waiting: Sequence[Whereabouts], missing: Sequence[int]
) -> Iterator[str]:
    names = dict.fromkeys(place.name for place in waiting)
    goals = [name if name.startswith("the ") else f"`{name}`" for name in names]
    goal = f"arrived at {' or '.join(goals)}" if waiting else "finished it"
    if missing:
        has = "has" if len(missing) == 1 else "have"
        yield f"{listed('Rank', missing, ' and ')} {has} ended."
    if late:
        one = len(late) == 1
        ranks = listed("Rank", [look.rank for look in late], " and ")
        words = (
            f"{'it' if one else f'rank {look.rank}'} {place_in_words(look.process, look.children)}"
            for look in late
        )
        yield f"{ranks} {'has' if one else 'have'} not {goal}: {'; '.join(words)}."


def _sites(waiting: Sequence[Whereabouts]) -> str:
    """Describe where the waiting ranks are, if their own lines say more than a barrier's name."""
    if any(place.is_meeting for place in waiting):
        return ""
    sites = list(dict.fromkeys(place.site.words for place in waiting if place.site))
    return f", in {' and '.join(sites[:2])}" if sites else ""


def _mismatch(looks: Sequence[RankState], waiting: Sequence[Whereabouts], hang: Hang) -> str:
    groups: dict[str, list[int]] = {}
    for place in waiting:
        groups.setdefault(place.sight, []).append(place.rank)
    places = "; ".join(
        f"{listed('rank' if n else 'Rank', ranks, ' and ')} {'is' if len(ranks) == 1 else 'are'} "
        f"in {sight}"
        for n, (sight, ranks) in enumerate(groups.items())
    )
    sentences = [_opening(waiting, looks, hang), f"{places}."]
    counts = {look.rank: look.num_calls for look in looks}
    if len(groups) > 1:
        sentences[1:1] = ["Ranks wait for each other."]
        sentences.append(_SAME_CALLS)
    elif len(set(counts.values())) > 1:
        made = ", ".join(f"for rank {rank} call {count}" for rank, count in counts.items())
        sentences.append(f"But it is not the same one: {made}. {_SAME_CALLS}")
    return "\n".join([" ".join(sentences), *_details(looks, hang)])


def _details(looks: Sequence[RankState], hang: Hang, *, is_titled: bool = True) -> Iterator[str]:
    for look in looks[:_STACKS_AT_MOST]:
        indent = "    " if is_titled else "  "
        if is_titled and look.process.stack:
            yield f"  rank {look.rank}, process {look.process.pid}:"
        for line in folded(look.process.stack, hang.folder):
            yield f"{indent}{line}"
        for child in look.children:
            yield f"{indent}{_child(child)}"
            own = loader_part(child.stack) if is_stuck(child) else None
            for line in folded(own or (), hang.folder):
                yield f"{indent}  {line}"


def _child(child: ProcessState) -> str:
    if loader_part(child.stack) is None:
        does = place_in_words(child) if child.stack else "runs"
        return f"child process {child.pid} ({child.command}) {does}"
    does = place_in_words(child) if is_stuck(child) else "is idle"
    return f"loader process {child.pid} {does}"

"""What does the run on one rank read? What the ranks of the run before read together.

A pure function of their traces: see the package's docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.verify.raw_trace import Identities, RawTrace

_NOT_SHARED = -1


def feed_of(traces: Sequence[RawTrace], *, one_by_one: bool = False) -> dict[str, Any]:
    """Return the samples of each iteration, as batches of ``[index, content]``.

    Args:
        traces: of all ranks.
        one_by_one: give the ranks' batches one after the other, to a program that accumulates
            more passes on fewer ranks, instead of putting them together.

    Returns:
        ``epochs`` by ``"loader/iteration"``, ``lengths`` of the loaders' datasets (-1: an index
        means another sample on each rank), and global ``batch_sizes``, by loader.
    """
    identities = Identities(traces)
    epochs, factors, lengths = {}, {}, {}
    for place in sorted({place for trace in traces for place in trace.epochs}):
        plans = [_batches(trace, place) for trace in traces if place in trace.epochs]
        known = [plan for plan in plans if plan is not None]
        if len(known) == len(plans):
            loader, epoch = place
            epochs[f"{loader}/{epoch}"], factors[loader] = _together(known, one_by_one)
    for number, facts in traces[0].loaders.items():
        is_shared = identities.are_shared(facts["dataset"])
        lengths[str(number)] = facts["base_length"] if is_shared else _NOT_SHARED
    sizes = _batch_sizes(traces, factors)
    return {"epochs": epochs, "lengths": lengths, "batch_sizes": sizes}


def _batches(trace: RawTrace, place: tuple[int, int]) -> list[list[list[Any]]] | None:
    kept = trace.epochs[place].get("kept")
    if kept is None:
        return None
    contents = trace.contents.get(trace.loaders[place[0]]["dataset"], {})
    return [[[index, contents.get(index, "")] for index in batch] for batch in kept]


def _together(plans: list[Any], one_by_one: bool) -> tuple[list[Any], int]:
    """Put the batches of ranks together, and say how many make one.

    Ranks that read the same read it once.
    """
    if all(plan == plans[0] for plan in plans):
        return plans[0], 1
    rows = [[plan[at] for plan in plans if at < len(plan)] for at in range(max(map(len, plans)))]
    if one_by_one:
        return [batch for row in rows for batch in row], 1
    return [[item for batch in row for item in batch] for row in rows], len(plans)


def _batch_sizes(traces: Sequence[RawTrace], factors: dict[int, int]) -> dict[str, int]:
    """Work out global batch sizes; a loader that nobody iterates over goes with its dataset's."""
    loaders = traces[0].loaders
    of_dataset = {loaders[k]["dataset"]: factor for k, factor in factors.items() if k in loaders}
    sizes = {}
    for number, facts in loaders.items():
        factor = factors.get(number, of_dataset.get(facts["dataset"], len(traces)))
        size = facts["batch_size"]
        if factor > 1:
            size = sum(t.loaders[number]["batch_size"] or 0 for t in traces if number in t.loaders)
        if size:
            sizes[str(number)] = size
    return sizes

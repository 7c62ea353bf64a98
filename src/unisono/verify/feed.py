"""What does the run on one rank read? What the ranks of the run before read together.

A pure function of their traces: see the package's docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.verify.identities import Identities
from unisono.verify.raw_trace import RawTrace

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
    places = sorted({place for trace in traces for place in trace.epochs})
    epochs, factors = {}, {}
    for loader, epoch in places:
        plans = [
            _batches(trace, loader, epoch) for trace in traces if (loader, epoch) in trace.epochs
        ]
        if any(plan is None for plan in plans):
            continue
        batches, factors[loader] = _together([p for p in plans if p is not None], one_by_one)
        epochs[f"{loader}/{epoch}"] = batches
    return {
        "epochs": epochs,
        "lengths": {str(k): _length(traces[0], k, identities) for k in traces[0].loaders},
        "batch_sizes": _batch_sizes(traces, factors),
    }


def _batches(trace: RawTrace, loader: int, epoch: int) -> list[list[list[Any]]] | None:
    kept = trace.epochs[loader, epoch].get("kept")
    if kept is None:
        return None
    contents = trace.contents.get(trace.loaders[loader]["dataset"], {})
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


def _length(trace: RawTrace, loader: int, identities: Identities) -> int:
    facts = trace.loaders[loader]
    is_shared = identities.are_shared(facts["dataset"])
    return int(facts["base_length"]) if is_shared else _NOT_SHARED


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

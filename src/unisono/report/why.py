"""Why is a run not faster? What its steps show, where its time went, and what that suggests."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.quantities import percent
from unisono.report.history import History
from unisono.report.time_spent import PartOfTime

_MUCH = {
    "starting up": (0.3, "a longer run has less of it"),
    "checkpoints": (0.05, "write them less often (`checkpoint_every=`), or to a faster disk"),
    "evaluation": (0.2, "validate less often (`validate_every=`)"),
}


def said(history: History) -> list[str]:
    """Say in sentences what costs time."""
    found = [one.line for one in history.findings or ()]
    found += _of_parts(parts(history))
    if not found:
        found.append(_nothing_found(history))
    return [f"{one[0].upper()}{one[1:]}." for one in found]


def parts(history: History) -> list[PartOfTime]:
    """Divide the time of the run."""
    return history.spent.parts(history.phases, history.progress.seconds)


def _of_parts(found: list[PartOfTime]) -> Iterator[str]:
    for part in found:
        least, remedy = _MUCH.get(part.name, (2.0, ""))
        if part.share >= least:
            what = "waiting for checkpoints" if part.name == "checkpoints" else part.name
            yield f"{what} takes {percent(part.share)} of the time: {remedy}"


def _nothing_found(history: History) -> str:
    if len(history.phases.by_rank) < 2:
        return "nothing stands out: the time goes into computing"
    if history.findings is None:
        return "the steps were too few to tell whether a worker is slow"
    return "nothing stands out: no worker is slow, and the machine was not too busy"

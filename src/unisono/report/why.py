"""Why is a run not faster? What it found itself, where its time went, and what that suggests."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.quantities import percent
from unisono.report.history import History
from unisono.report.speed_facts import MachineUse
from unisono.report.time_spent import PartOfTime

_MUCH = {
    "starting up": (0.3, "a longer run has less of it"),
    "loading": (0.15, "`loader_workers=2` reads ahead while steps are computed"),
    "checkpoints": (0.05, "write them less often (`checkpoint_every=`), or to a faster disk"),
    "evaluation": (0.2, "validate less often (`validate_every=`)"),
    "between": (0.15, "look at callbacks, and at what the program does between steps"),
}
_MAX_FINDINGS = 10  # only a made-up file has more
_LITTLE = 0.05  # of a core


def said(history: History) -> list[str]:
    """Say in sentences what costs time."""
    speed = history.progress.speed
    found = [] if speed is None else [one.in_words for one in speed.findings[:_MAX_FINDINGS]]
    found += _of_parts(parts(history))
    if not found:
        found.append(_nothing_found(history))
    if speed is not None and (machine := _of_machine(speed.machine)):
        found.append(machine)
    return [f"{one[0].upper()}{one[1:]}." for one in found]


def parts(history: History) -> list[PartOfTime]:
    """Divide the time of the run."""
    return history.spent.parts(history.phases.stretches, history.progress.seconds)


def _of_parts(found: list[PartOfTime]) -> Iterator[str]:
    for part in found:
        least, remedy = _MUCH.get(part.name, (2.0, ""))
        if part.share >= least:
            what = "what lies between steps" if part.name == "between" else part.name
            what = "waiting for checkpoints" if part.name == "checkpoints" else what
            yield f"{what} takes {percent(part.share)} of the time: {remedy}"


def _nothing_found(history: History) -> str:
    if len(history.phases.ranks) < 2:
        return "nothing stands out: the time goes into computing"
    if history.progress.speed is None:
        return "the steps were too few to tell whether a worker is slow"
    return "nothing stands out: no worker is slow, and the machine was not too busy"


def _of_machine(machine: MachineUse) -> str:
    if machine.cores is None or machine.workers is None:
        return ""
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    words = f"of {cores} the workers used {machine.workers:.1f} when the run was last looked at"
    if machine.busy is not None and machine.busy - machine.workers > _LITTLE:
        words += f", other programs {machine.busy - machine.workers:.1f}"
    for share, who in ((machine.stolen, "the hypervisor"), (machine.throttled, "a limit of CPU")):
        if share is not None and share > _LITTLE:
            words += f"; {who} took {percent(share)} of the time"
    return words

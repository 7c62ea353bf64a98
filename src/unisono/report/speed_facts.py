"""What an event file says of what slows the steps: as the run itself has found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from unisono.quantities import percent
from unisono.report import fields

SLOW_WORKER = "slow worker"
IN_REPORT_ALONE = ("small batches", "all wait alike")  # nobody has to be told while it runs


@dataclass(frozen=True)
class Slowness:
    """One thing that costs time; ``cost`` is its part of the run."""

    cause: fields.Text
    rank: fields.Count
    phases: fields.Texts
    cost: fields.Seconds
    sentence: fields.Text
    remedy: fields.Text

    @property
    def in_words(self) -> str:
        """What it is, what it costs, and what to do."""
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{self.sentence or self.cause or 'something'}{self.costs}{remedy}"

    @property
    def costs(self) -> str:
        """What it costs, to stand behind the sentence."""
        return "" if self.cost is None else f", which costs {percent(self.cost)} of the run"


@dataclass(frozen=True)
class MachineUse:
    """How busy the machine was: cores, and how many of them were in use."""

    cores: fields.Count
    busy: fields.Seconds
    workers: fields.Seconds
    stolen: fields.Seconds
    throttled: fields.Seconds


@dataclass(frozen=True)
class SpeedFacts:
    """What was found; ``seconds`` is how long the fit had lasted then."""

    findings: Annotated[tuple[Slowness, ...], fields.reader_of_several(Slowness)]
    seconds: fields.Seconds
    snapshots_s: fields.Seconds
    disk_s: fields.Seconds
    machine: Annotated[MachineUse, fields.reader_of(MachineUse)]


Speed: TypeAlias = Annotated[SpeedFacts | None, fields.optional_reader_of(SpeedFacts)]

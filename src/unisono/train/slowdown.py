"""What makes steps slower, in numbers and in words: one finding, and what a watch reports."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

COSTS = 0.05  # of the steps' time: less is not worth telling


class SlowdownCause(enum.Enum):
    """What costs time; the value is its name in the event file."""

    WORKER = "slow worker"
    CORE = "slow core"
    UNEVEN = "uneven shards"
    DEVICES = "mixed devices"
    BUSY = "busy machine"
    WHOLE_UPDATE = "whole update"
    ALIKE = "all wait alike"
    SMALL = "small batches"


TOLD = (
    SlowdownCause.WORKER,
    SlowdownCause.CORE,
    SlowdownCause.UNEVEN,
    SlowdownCause.DEVICES,
    SlowdownCause.BUSY,
    SlowdownCause.WHOLE_UPDATE,
)
"""What is worth a line at the end of a run; the rest stands in the report."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One thing that costs time."""

    cause: SlowdownCause  # what
    excess_s: float  # by how much longer something takes, in seconds
    lost_s: float  # by how much longer a step is for that; less where another worker is slow, too
    of_step: float  # that as a part of a step's time
    cost: float  # that as a part of the run's time, as far as it has come
    sentence: str  # says it, but not what it costs of the run
    remedy: str  # what to do; empty where there is nothing
    rank: int | None = None  # of the worker that it is about; None: no single one
    phases: tuple[str, ...] = ()  # in which of `COLUMNS` that worker is slow, the slowest first

    @property
    def key(self) -> tuple[SlowdownCause, int | None]:
        """What makes two findings the same."""
        return self.cause, self.rank

    @property
    def line(self) -> str:
        """What is said of it at the end of a run."""
        advice = f": {self.remedy}" if self.remedy else ""
        return f"{self.sentence}, which costs {percent(self.cost)} of the run{advice}"

    def costing(self, cost: float) -> Slowdown:
        """Give the same with another cost."""
        return replace(self, cost=cost)


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """What watching has found so far."""

    # what costs time now, the costliest first; at the end: what did in the whole loop
    findings: tuple[Slowdown, ...]
    facts: dict[str, Any]  # the rest, as plain JSON, for the event file
    is_final: bool = False  # whether the loop is over

    @property
    def in_words(self) -> str:
        """What the end of a run says of it, a line each; empty where nothing cost enough."""
        told = [one for one in self.findings if one.cause in TOLD and one.cost >= COSTS]
        return "\n".join(one.line for one in told)

    @property
    def as_json(self) -> dict[str, Any]:
        """All of it, as plain JSON."""
        found = [
            {
                "cause": one.cause.value,
                "rank": one.rank,
                "phases": list(one.phases),
                "excess_s": round(one.excess_s, 6),
                "of_step": round(one.of_step, 4),
                "cost": round(one.cost, 4),
                "sentence": one.sentence,
                "remedy": one.remedy,
            }
            for one in self.findings
        ]
        return {"is_final": self.is_final, "findings": found, **self.facts}


def percent(share: float) -> str:
    """Write a share as people read it."""
    return f"{share:.0%}".replace("%", " %")


def milliseconds(seconds: float) -> str:
    """Write a time of a step as people read it."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

"""What watching a loop's speed has found so far, in words and as plain JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.train.slowdown import COSTS, TOLD, Slowdown


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

"""Who computes together now? A frozen value that the launcher decides and every worker believes.

Ranks are seats: a worker that is lost leaves its seat empty until a replacement takes it. What is
divided among workers (shards, pieces) is divided by their position in the membership.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers that compute together.

    Attributes:
        ranks: ascending, at least one.
        leader: the one of them that speaks for all: its values are shared, it keeps the clock.
        generation: grows with every change.
        why: what happened to those of the membership before who are not in this one, in words.
    """

    ranks: tuple[int, ...]
    leader: int
    generation: int = 0
    why: str = field(default="", compare=False)

    def position(self, rank: int) -> int:
        """Count the workers of the membership before `rank`."""
        return self.ranks.index(rank)

    def as_json(self) -> dict[str, Any]:
        """Write it as plain JSON."""
        return {
            "ranks": list(self.ranks),
            "leader": self.leader,
            "generation": self.generation,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Membership:
        """Read what :meth:`as_json` wrote."""
        return cls(tuple(value["ranks"]), value["leader"], value["generation"], value["why"])

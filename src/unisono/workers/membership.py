"""Who computes together now? A frozen value that the launcher decides and every worker believes.

Ranks are seats: a worker that is lost leaves its seat empty until a replacement takes it. What is
divided among workers (shards, pieces) is divided by their position in the membership.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers that compute together."""

    ranks: tuple[int, ...]  # ascending, at least one
    leader: int  # the one of them that speaks for all: its values are shared, it keeps the clock
    generation: int = 0  # grows with every change
    # what happened to those of the membership before who are not in this one, in words
    why: str = field(default="", compare=False)

    @classmethod
    def of(cls, world_size: int) -> Membership:
        """Have all workers compute together, as in the beginning."""
        return cls(tuple(range(world_size)), leader=0)

    def position(self, rank: int) -> int:
        """Count the workers of the membership before `rank`."""
        return self.ranks.index(rank)

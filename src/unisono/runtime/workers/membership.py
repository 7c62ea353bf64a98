"""Which workers compute together."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers that compute together; they divide work by their positions in `ranks`."""

    ranks: tuple[int, ...]  # ascending, at least one
    leader: int  # the worker whose values are shared, and which keeps the clock
    generation: int = 0  # grows with every change
    # what happened to the workers of the previous membership that are missing, in words
    why: str = field(default="", compare=False)

    @classmethod
    def of(cls, world_size: int) -> Membership:
        """Return the initial membership, of all workers."""
        return cls(tuple(range(world_size)), leader=0)

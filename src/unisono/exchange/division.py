"""Which shards each worker computes in a step.

Follows from the membership, and from the speeds of the workers' devices where these differ. Where
a worker is lost within a step, the others keep what they have computed and divide the rest among
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.plan.shards import Held, assign, take_over
from unisono.plan.summation import Node, parts_of
from unisono.workers.membership import Membership
from unisono.workers.team import Team


class Division:
    """The division of one loop's work. Final.

    Attributes:
        shards: those that this worker computes, as long as nobody is lost.
        parts: those of all workers; together they are every shard once.
        parts_of: those of each member, by its rank.
        mine: those of `parts` that are this worker's, as long as nobody is lost.
    """

    def __init__(self, team: Team, num_shards: int) -> None:
        self._team, self.num_shards = team, num_shards
        self._speeds: Mapping[int, float] | None = None
        self.divide()

    def use_speeds(self, speeds: Mapping[int, float] | None) -> None:
        """Give faster workers more shards, from the next :meth:`divide` on.

        Args:
            speeds: of each worker by its rank, the same on every worker; None: all are equal.
        """
        self._speeds = speeds

    def divide(self) -> None:
        """Divide all anew among those who are members now."""
        team = self._team
        ranks = team.membership.ranks
        speeds = None if self._speeds is None else [self._speeds[rank] for rank in ranks]
        ranges = assign(self.num_shards, len(ranks), speeds)
        self._held: Held = {r: [own] for r, own in zip(ranks, ranges, strict=True)}
        self._membership: Membership = team.membership
        self._divided_by = self._speeds
        self.shards = ranges[team.position]
        self.mine = self._parts_among([self.shards])
        self._follow()

    @property
    def is_outdated(self) -> bool:
        """Whether others are members now than when all was divided, or speeds are others."""
        return self._membership != self._team.membership or self._speeds != self._divided_by

    def take_over(self) -> list[Node]:
        """Divide what lost workers have left in the step under way.

        Returns:
            The parts that this worker computes besides; maybe none.
        """
        self._held, new = take_over(self._held, self._team.membership.ranks)
        self._follow()
        return self._parts_among(new[self._team.world.rank])

    def _parts_among(self, runs: Sequence[range]) -> list[Node]:
        return [p for run in runs for p in parts_of(run, self.num_shards)]

    def _follow(self) -> None:
        self.parts_of = {rank: self._parts_among(runs) for rank, runs in self._held.items()}
        self.parts = [part for parts in self.parts_of.values() for part in parts]

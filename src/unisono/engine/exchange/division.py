"""Which shards each worker computes, and which parts of the sum it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from unisono.plan.shards import Held, assign, take_over
from unisono.plan.summation import Node, parts_of
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.team import Team


@final
class Division:
    """The division of one loop's work, which follows from the membership.

    If a worker is lost within a step, the others keep the shards they have computed and divide the
    rest.

    Attributes:
        shards: the shards that this worker computes if no worker is lost.
        parts: the parts of all workers; together they contain every shard once.
        parts_of: the parts of each member, by rank.
        mine: the parts of this worker if no worker is lost.
    """

    def __init__(self, team: Team, num_shards: int) -> None:
        self._team, self.num_shards = team, num_shards
        self.divided_for: Membership | None = None
        self.divide()

    def divide(self) -> None:
        """Divide all shards among the current members."""
        team = self._team
        ranks = team.membership.ranks
        ranges = assign(self.num_shards, len(ranks))
        self._held: Held = {r: [own] for r, own in zip(ranks, ranges, strict=True)}
        self.divided_for = team.membership
        self.shards = ranges[team.position]
        self.mine = self._parts_among([self.shards])
        self._follow()

    @property
    def is_outdated(self) -> bool:
        """Whether the membership has changed since the shards were divided."""
        return self.divided_for != self._team.membership

    def take_over(self) -> list[Node]:
        """Divide the shards of lost workers in this step; return the parts this worker adds."""
        self._held, new = take_over(self._held, self._team.membership.ranks)
        self._follow()
        return self._parts_among(new[self._team.world.rank])

    def _parts_among(self, runs: Sequence[range]) -> list[Node]:
        return [p for run in runs for p in parts_of(run, self.num_shards)]

    def _follow(self) -> None:
        self.parts_of = {rank: self._parts_among(runs) for rank, runs in self._held.items()}
        self.parts = [part for parts in self.parts_of.values() for part in parts]

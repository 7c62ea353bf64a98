"""The sum over groups of shards, of which each host has some: sent in slices, in a chosen dtype.

::

    host 0   its groups ─┐            ┌─► slice 0 of all, added ─┐            ┌─► all
                         │ all_to_all │       in tree order      │ all_gather │
    host 1   its groups ─┘            └─► slice 1 of all, added ─┘            └─► all

On one host the same additions are made, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unisono.exchange.arena import Arena
from unisono.exchange.homes import StateKeys
from unisono.exchange.lane_transfers import LaneTransfers
from unisono.exchange.link_state import LinkState
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import Parts, PublishedParts
from unisono.plan.slices import Piece, split
from unisono.plan.summation import Node


@dataclass(frozen=True, slots=True)
class SumPlan:
    """What one worker adds up, and with whom.

    Attributes:
        arena: where parts and sums are.
        keys: of the optimizer's state.
        parameters: those that the optimizer updates.
        state: what is kept from step to step.
        parts: of all workers.
        pieces: what this worker adds up.
        held: the groups of each host.
        host: which one this is.
        lane: connects those who add up the same pieces on other hosts; None: there are none.
        leads: whether this worker speaks for its host.
    """

    arena: Arena
    keys: StateKeys
    parameters: Sequence[nn.Parameter]
    state: LinkState
    parts: Sequence[Node]
    pieces: Sequence[Piece]
    held: Sequence[Sequence[Node]]
    host: int
    lane: LaneTransfers | None
    leads: bool

    @property
    def groups(self) -> list[Node]:
        """All groups."""
        return [group for own in self.held for group in own]

    @property
    def own(self) -> Sequence[Node]:
        """The groups of this host."""
        return self.held[self.host]

    def sums(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of a group's sum, by its first shard."""
        return Parts(self.arena).views(lo, pieces)


class GroupSum:
    """Adds up what groups have come to, where their sums lie. Final.

    Args:
        published: says which parameters a group has a sum for.
        dtype: in which values are sent; they must be of it already.

    Attributes:
        slices: the pieces that each host adds up.
        pieces: those of this host.
        totals: the sums over `pieces`, where that of shard 0 lies.
    """

    def __init__(self, plan: SumPlan, published: PublishedParts, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        self.slices = split(plan.pieces, len(plan.held))
        self.pieces = self.slices[plan.host]
        self._sum = OrderedSum(published, plan.groups, self.pieces)
        self.totals = self._sum.totals

    def add(self) -> None:
        """Add up this host's slice. Collective among those of a lane."""
        if self._plan.lane is not None:
            self._exchange(self._plan.lane)
        self._sum.add()

    def give(self) -> None:
        """Give this host's slice of the totals to all, and get theirs. Collective likewise."""
        plan = self._plan
        if plan.lane is None:
            return
        into = [plan.sums(0, slice_) for slice_ in self.slices]
        received = plan.lane.all_gather(self._joined(self.totals), _lengths(into))
        for host, (vectors, values) in enumerate(zip(into, received, strict=True)):
            if host != plan.host:
                _take_apart(vectors, values)

    def _exchange(self, lane: LaneTransfers) -> None:
        plan = self._plan
        sent = [
            self._joined([v for group in plan.own for v in plan.sums(group.lo, slice_)])
            for slice_ in self.slices
        ]
        into = [[v for g in held for v in plan.sums(g.lo, self.pieces)] for held in plan.held]
        sent[plan.host], into[plan.host] = sent[plan.host][:0], []  # they are there
        for vectors, values in zip(into, lane.all_to_all(sent, _lengths(into)), strict=True):
            _take_apart(vectors, values)

    def _joined(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy values one behind the other."""
        return torch.cat([torch.empty(0), *vectors]).to(self._dtype)


def _lengths(into: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    return [sum(vector.numel() for vector in vectors) for vectors in into]


def _take_apart(into: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    at = 0
    for vector in into:
        vector.copy_(values[at : at + vector.numel()])
        at += vector.numel()

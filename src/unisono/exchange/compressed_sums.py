"""The sum of all groups where a slow link is between them: each group's is made smaller first.

::

    the parts of a group ─► its sum, in tree order      exact, inside of a host
    its sum + residual   ─► rounded                     what rounding takes is the next residual
    all groups           ─► their sum, in tree order    of the rounded values, in float32
    the sum + residual   ─► rounded                     what everybody gets

On several hosts each adds up a slice of the rounded values and gives it to the others. On one host
the same operations are made without sending anything, so the bits are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.exchange.arena import Arena
from unisono.exchange.host_parts import HostParts
from unisono.exchange.lane_transfers import LaneTransfers
from unisono.exchange.link_state import LinkState
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import Parts, presence
from unisono.exchange.slow_link import RESIDUAL_OF_ALL, Bf16Gradients, SlowLink, residual_of
from unisono.plan.slices import Piece, split
from unisono.plan.summation import Node

_Vectors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class SumPlan:
    """What one worker adds up, and with whom.

    Attributes:
        arena: where parts and sums are.
        state: what is kept from step to step.
        parts: of all workers.
        pieces: what this worker adds up.
        held: the groups of each host.
        host: which one this is.
        lane: connects those who add up the same pieces on other hosts; None: there are none.
    """

    arena: Arena
    state: LinkState
    parts: Sequence[Node]
    pieces: Sequence[Piece]
    held: Sequence[Sequence[Node]]
    host: int
    lane: LaneTransfers | None

    @property
    def groups(self) -> list[Node]:
        """All groups."""
        return [group for own in self.held for group in own]

    def sums(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of a group's sum, by its first shard."""
        return Parts(self.arena).views(lo, pieces)


class CompressedSum(ABC):
    """Adds up all groups over some pieces.

    Args:
        plan: what is added up.

    Attributes:
        pieces: what is added up here.
        totals: the sums over `pieces`, as vectors.
        num_bytes: what sums take beside parts.
    """

    num_bytes = 0

    def __init__(self, plan: SumPlan) -> None:
        self._plan, self.pieces = plan, plan.pieces
        self._parts = HostParts(plan.arena, plan.held, plan.host, plan.parts, plan.pieces)
        self.totals = plan.sums(0, plan.pieces)

    def add(self) -> tuple[bool, ...]:
        """Add up what has been published. Collective among those of a lane.

        Returns:
            For each parameter, whether any shard had a gradient for it; only then are its totals
            defined.
        """
        self._parts.add_up()
        self._compress(self._parts.present)
        return self._parts.present

    def flags(self, lo: int) -> bytes:
        """Read which parameters the group that begins with shard `lo` has gradients for."""
        return bytes(self._parts.flags[lo])

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of the group's sum; with `flags`, what an ordered sum is made of."""
        return self._plan.sums(lo, pieces)

    @abstractmethod
    def kept_by(self, host: int) -> list[torch.Tensor]:
        """View what of this lane's state one host alone has changed."""

    @abstractmethod
    def _compress(self, present: Sequence[bool]) -> None:
        """Turn the sums of groups into totals."""


class Bf16Sum(CompressedSum):
    """Adds up what is rounded to bfloat16. Final; see :class:`~.slow_link.Bf16Gradients`."""

    def __init__(self, plan: SumPlan) -> None:
        super().__init__(plan)
        state, groups = plan.state, plan.groups
        self._slices = split(plan.pieces, len(plan.held))
        self._mine = self._slices[plan.host]
        self._own = [
            (group, plan.sums(group.lo, plan.pieces), self._residuals(group, plan.pieces))
            for group in plan.held[plan.host]
        ]
        self._sum = OrderedSum(self, groups, groups[-1].hi, self._mine)
        self._residual = state.pieces(RESIDUAL_OF_ALL, self._mine)

    def kept_by(self, host: int) -> list[torch.Tensor]:
        """See :class:`CompressedSum`."""
        plan = self._plan
        own = [r for group in plan.held[host] for r in self._residuals(group, plan.pieces)]
        return own + plan.state.pieces(RESIDUAL_OF_ALL, self._slices[host])

    def _compress(self, present: Sequence[bool]) -> None:
        for group, sums, residuals in self._own:
            _round(self.pieces, presence(self.flags(group.lo)), sums, residuals)
        if self._plan.lane is not None:
            self._exchange_slices(self._plan.lane)
        self._sum.add()
        _round(self._mine, present, self._sum.totals, self._residual)
        if self._plan.lane is not None:
            self._give_totals(self._plan.lane)

    def _residuals(self, group: Node, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return self._plan.state.pieces(residual_of(self._plan.groups.index(group)), pieces)

    def _exchange_slices(self, lane: LaneTransfers) -> None:
        """Get this worker's slice of all groups' sums, and send the others theirs."""
        plan = self._plan
        sent = [
            _in_halves([v for group in plan.held[plan.host] for v in plan.sums(group.lo, slice_)])
            for slice_ in self._slices
        ]
        into = [[v for g in own for v in plan.sums(g.lo, self._mine)] for own in plan.held]
        into[plan.host] = []  # they are there
        sent[plan.host] = sent[plan.host][:0]
        for vectors, halves in zip(into, lane.all_to_all(sent, _lengths(into)), strict=True):
            _from_halves(vectors, halves)

    def _give_totals(self, lane: LaneTransfers) -> None:
        into = [self._plan.sums(0, slice_) for slice_ in self._slices]
        received = lane.all_gather(_in_halves(self._sum.totals), _lengths(into))
        for host, (vectors, halves) in enumerate(zip(into, received, strict=True)):
            if host != self._plan.host:
                _from_halves(vectors, halves)


_SUMS: dict[type[SlowLink], type[CompressedSum]] = {Bf16Gradients: Bf16Sum}


def compressed_sum(plan: SumPlan) -> CompressedSum:
    """Make what adds up the groups as the user has asked for."""
    return _SUMS[type(plan.state.link)](plan)


def _round(
    pieces: Sequence[Piece], present: Sequence[bool], values: _Vectors, residuals: _Vectors
) -> None:
    """Round values with what was left of the step before; note what is left now."""
    for piece, value, residual in zip(pieces, values, residuals, strict=True):
        if present[piece.index]:
            value.add_(residual)
            half = value.to(torch.bfloat16)  # to the nearest, of two the even one
            torch.sub(value, half, out=residual)
            value.copy_(half)


def _lengths(into: Sequence[_Vectors]) -> list[int]:
    return [sum(vector.numel() for vector in vectors) for vectors in into]


def _in_halves(vectors: _Vectors) -> torch.Tensor:
    """Copy values that are rounded already, one behind the other."""
    halves = [vector.to(torch.bfloat16) for vector in vectors]
    return torch.cat(halves) if halves else torch.empty(0, dtype=torch.bfloat16)


def _from_halves(into: _Vectors, halves: torch.Tensor) -> None:
    at = 0
    for vector in into:
        vector.copy_(halves[at : at + vector.numel()])
        at += vector.numel()

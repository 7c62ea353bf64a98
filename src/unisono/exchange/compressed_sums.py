"""The sum of all groups where a slow link is between them: each group's is made smaller first.

::

    the parts of a group ─► its sum, in tree order      exact, inside of a host
    its sum + residual   ─► rounded                     what rounding takes is the next residual
    all groups           ─► their sum, in tree order    of the rounded values, in float32
    the sum + residual   ─► rounded                     what everybody gets
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from unisono.exchange.group_sum import GroupSum, SumPlan
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import Parts, presence
from unisono.exchange.slow_link import RESIDUAL_OF_ALL, residual_of
from unisono.plan.rounds import within
from unisono.plan.slices import Piece
from unisono.plan.summation import Node


class CompressedSum(ABC):
    """Adds up all groups over some pieces.

    Attributes:
        pieces: what is added up here.
        totals: the sums over `pieces`, as vectors.
        num_bytes: what sums take beside parts.
    """

    num_bytes = 0

    def __init__(self, plan: SumPlan) -> None:
        self._plan, self.pieces = plan, plan.pieces
        self._within = {group.lo: within(group, plan.parts) for group in plan.groups}
        parts = Parts(plan.arena)
        self._of_groups = [
            OrderedSum(parts, self._within[group.lo], plan.pieces) for group in plan.own
        ]
        self._flags: dict[int, bytes] = {}
        self.totals = plan.sums(0, plan.pieces)

    def add(self) -> tuple[bool, ...]:
        """Add up what has been published. Collective among those of a lane.

        Returns:
            For each parameter, whether any shard had a gradient for it; only then are its totals
            defined.
        """
        present = self._add_up_groups()
        if (weight := self._plan.state.weight) is not None:
            self._divide(weight)
        self._compress(present)
        return present

    def _add_up_groups(self) -> tuple[bool, ...]:
        """Add up this worker's pieces of its host's groups, each where its first part was."""
        for own in self._of_groups:
            own.add()
        there = []
        for lo, parts in self._within.items():
            rows = [presence(bytes(self._plan.arena.flags[one.lo])) for one in parts]
            there.append([any(column) for column in zip(*rows, strict=True)])
            self._flags[lo] = bytes([0, *there[-1]])
        return tuple(any(column) for column in zip(*there, strict=True))

    def _divide(self, weight: float) -> None:
        for group in self._plan.own:
            there, sums = presence(self.flags(group.lo)), self.views(group.lo, self.pieces)
            own = [s for p, s in zip(self.pieces, sums, strict=True) if there[p.index]]
            if own:
                torch._foreach_div_(own, weight)

    def flags(self, lo: int) -> bytes:
        """Read which parameters the group that begins with shard `lo` has gradients for."""
        return self._flags[lo]

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of the group's sum; with `flags`, what an ordered sum is made of."""
        return self._plan.sums(lo, pieces)

    @abstractmethod
    def kept_by(self, host: int) -> list[torch.Tensor]:
        """View what this worker brings to all hosts of what one host alone has changed."""

    @abstractmethod
    def _compress(self, present: Sequence[bool]) -> None:
        """Turn the sums of groups into totals."""


class Bf16Sum(CompressedSum):
    """Adds up what is rounded to bfloat16. Final; see :class:`~.slow_link.Bf16Gradients`."""

    def __init__(self, plan: SumPlan) -> None:
        super().__init__(plan)
        self._sum = GroupSum(plan, self, torch.bfloat16)
        self._own = [
            (group, plan.sums(group.lo, plan.pieces), self._residuals(group)) for group in plan.own
        ]
        self._residual = plan.state.pieces(RESIDUAL_OF_ALL, self._sum.pieces)

    def kept_by(self, host: int) -> list[torch.Tensor]:
        """See :class:`CompressedSum`."""
        own = [tensor for group in self._plan.held[host] for tensor in self._residuals(group)]
        return own + self._plan.state.pieces(RESIDUAL_OF_ALL, self._sum.slices[host])

    def _compress(self, present: Sequence[bool]) -> None:
        for group, sums, residuals in self._own:
            _round(self.pieces, presence(self.flags(group.lo)), sums, residuals)
        self._sum.add()
        _round(self._sum.pieces, present, self._sum.totals, self._residual)
        self._sum.give()

    def _residuals(self, group: Node) -> list[torch.Tensor]:
        number = self._plan.groups.index(group)
        return self._plan.state.pieces(residual_of(number), self._plan.pieces)


def _round(
    pieces: Sequence[Piece],
    present: Sequence[bool],
    values: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
) -> None:
    """Round values with what was left of the step before; note what is left now."""
    for piece, value, residual in zip(pieces, values, residuals, strict=True):
        if present[piece.index]:
            value.add_(residual)
            half = value.to(torch.bfloat16)  # to the nearest, of two the even one
            torch.sub(value, half, out=residual)
            value.copy_(half)

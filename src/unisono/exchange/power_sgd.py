"""The sum of all groups in two thin factors for each matrix, as PowerSGD has it.

::

    M = a group's sum + its residual                     n × m
    P = orthonormal columns of the sum of all M Q        n × r     sent: M Q of each group
    Q = the sum of all Mᵀ P                              m × r     sent: Mᵀ P of each group
    total = P Qᵀ         residual = M − P (Mᵀ P)ᵀ                  Q is where the next step begins

Each matrix is one worker's as a whole on every host, and what is computed of all groups' factors is
computed on every host with the same operations. What no factors make smaller is sent as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from unisono.exchange.compressed_sums import CompressedSum
from unisono.exchange.group_sum import GroupSum, SumPlan
from unisono.exchange.lane_transfers import LaneTransfers
from unisono.exchange.parts import presence
from unisono.exchange.slow_link import FACTOR, PowerSGD, matrix_of, residual_of
from unisono.plan.summation import Node, tree_sum

_Values = dict[int, torch.Tensor]
"""By place among the pieces."""


class _Group(NamedTuple):
    """A group of this host: its sums and residuals, a matrix for each piece."""

    node: Node
    sums: Sequence[torch.Tensor]
    residuals: Sequence[torch.Tensor]


class PowerSgdSum(CompressedSum):
    """Adds up what factors stand for. Final; see :class:`~.slow_link.PowerSGD`."""

    def __init__(self, plan: SumPlan) -> None:
        super().__init__(plan)
        assert isinstance(plan.state.link, PowerSGD)
        self._link = plan.state.link
        self._exact = GroupSum(plan, self, torch.float32)
        slots = plan.arena.plan.parameters
        shapes = [matrix_of(slots[piece.index], self._link.rank) for piece in plan.pieces]
        self._is_thin = [shape is not None for shape in shapes]
        self._shapes = [
            shape or (piece.stop, 1) for shape, piece in zip(shapes, plan.pieces, strict=True)
        ]
        factors = plan.state.region(FACTOR)
        self._factors = [factors.tensor(piece.index) for piece in plan.pieces]
        self._own = [self._group(node) for node in plan.own]
        self._matrices = self._shaped(self.totals)

    def kept_by(self, host: int) -> list[torch.Tensor]:
        """See :class:`CompressedSum`; all hosts have the same factors."""
        return [r.view(-1) for node in self._plan.held[host] for r in self._group(node).residuals]

    def _compress(self, present: Sequence[bool]) -> None:
        if self._plan.state.step < self._link.start_step:
            self._exact.add()
            self._exact.give()
            return
        there = [present[piece.index] for piece in self.pieces]
        places = [at for at, is_there in enumerate(there) if is_there]
        self._begin_factors(places)
        lefts = [self._left(group, places) for group in self._own]
        bases = self._sums(lefts, {at: self._left_shape(at) for at in places})
        thin = [at for at in places if self._is_thin[at]]
        bases |= {at: torch.linalg.qr(bases[at]).Q for at in thin}
        rights = [self._right(group, thin, bases) for group in self._own]
        factors = self._sums(rights, {at: self._factors[at].shape for at in thin})
        for group, right in zip(self._own, rights, strict=True):
            for at, factor in right.items():
                torch.sub(group.sums[at], bases[at] @ factor.T, out=group.residuals[at])
        for at in places:
            total = bases[at]
            if self._is_thin[at]:
                self._factors[at].copy_(factors[at])
                total = total @ factors[at].T
            self._matrices[at].copy_(total)

    def _begin_factors(self, places: Sequence[int]) -> None:
        """Draw the factors that a run begins with, the same everywhere."""
        for at in places:
            factor = self._factors[at]
            if self._is_thin[at] and not factor.any():
                generator = torch.Generator().manual_seed(self.pieces[at].index)
                factor.copy_(torch.randn(factor.shape, generator=generator))

    def _left(self, group: _Group, places: Sequence[int]) -> _Values:
        """Take a group's products with the factors; what is not thin as it is."""
        found = {}
        for at in self._of(group, places):
            found[at] = group.sums[at]
            if self._is_thin[at]:
                found[at] = found[at].add_(group.residuals[at]) @ self._factors[at]
        return found

    def _left_shape(self, at: int) -> tuple[int, ...]:
        rows, columns = self._shapes[at]
        return (rows, self._factors[at].shape[1] if self._is_thin[at] else columns)

    def _right(self, group: _Group, places: Sequence[int], bases: _Values) -> _Values:
        return {at: group.sums[at].T @ bases[at] for at in self._of(group, places)}

    def _of(self, group: _Group, places: Sequence[int]) -> list[int]:
        """Choose the places that a group has gradients for."""
        there = presence(self.flags(group.node.lo))
        return [at for at in places if there[self.pieces[at].index]]

    def _sums(self, own: Sequence[_Values], shapes: Mapping[int, Sequence[int]]) -> _Values:
        """Add up what all groups have, in tree order. Collective among those of a lane.

        Args:
            own: what groups of this host have, by place.
            shapes: of all places.
        """
        lane = self._plan.lane
        of_groups = own if lane is None else self._gathered(lane, own, shapes)
        return {at: _tree_sum([values.get(at) for values in of_groups]) for at in shapes}

    def _gathered(
        self, lane: LaneTransfers, own: Sequence[_Values], shapes: Mapping[int, Sequence[int]]
    ) -> list[_Values]:
        """Get what the groups of all hosts have."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        sent = [
            values[at].flatten() if at in values else torch.zeros(size)
            for values in own
            for at, size in zip(shapes, sizes, strict=True)
        ]
        lengths = [len(held) * sum(sizes) for held in self._plan.held]
        found: list[_Values] = []
        joined = lane.all_gather(torch.cat([torch.empty(0), *sent]), lengths)
        for held, vector in zip(self._plan.held, joined, strict=True):
            ends = iter(itertools.accumulate(sizes * len(held)))
            for node in held:
                group = _Group(node, (), ())
                parts = {
                    at: vector[end - size : end].view(*shape)
                    for (at, shape), size, end in zip(shapes.items(), sizes, ends, strict=False)
                }
                there = self._of(group, list(shapes))
                found.append({at: parts[at] for at in there})
        return found

    def _group(self, node: Node) -> _Group:
        plan = self._plan
        label = residual_of(plan.groups.index(node))
        residuals = self._shaped(plan.state.pieces(label, plan.pieces))
        return _Group(node, self._shaped(plan.sums(node.lo, plan.pieces)), residuals)

    def _shaped(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [v.view(*shape) for v, shape in zip(vectors, self._shapes, strict=True)]


def _tree_sum(values: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Add up what there is; at least one group has something."""

    def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
        return right if left is None else left if right is None else left + right

    total = tree_sum(values, add)
    assert total is not None
    return total

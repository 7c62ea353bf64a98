"""Groups of shards that update parameters of their own, and now and then agree on an outer step.

::

    outer parameters ──┬─► of group 0 ─ its gradients ─ update ─ … H steps ─► ─┐
                       └─► of group 1 ─ its gradients ─ update ─ … H steps ─► ─┴─► outer step

The outer parameters are the model's, between steps and for whoever looks at it. While a shard is
computed, the model has those of the shard's group. A group's parameters and its state of the
optimizer are kept from step to step with the slow link's state, so a run goes on in the midst.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.exchange.compressed_sums import CompressedSum
from unisono.exchange.group_sum import GroupSum, SumPlan
from unisono.exchange.homes import Homes
from unisono.exchange.parts import presence
from unisono.exchange.slow_link import OUTER_MOMENTUM, DiLoCo, known_of, parameters_of, states_of
from unisono.plan.slices import Piece
from unisono.plan.summation import Node


class LocalGroup:
    """One group of this host. Final.

    Args:
        group: its shards.

    Attributes:
        shards: of the group.
        homes: its parameters and their optimizer state.
        totals: the sums of its gradients over this worker's pieces.
        parameters: its whole parameters.
    """

    def __init__(self, plan: SumPlan, group: Node) -> None:
        number, state = plan.groups.index(group), plan.state
        self.shards = range(group.lo, group.hi)
        self.parameters = state.region(parameters_of(number))
        self.states = state.region(states_of(number))
        self.whose = state.bytes(known_of(number))
        self.homes = Homes(self, plan.keys)
        self.totals = plan.sums(group.lo, plan.pieces)
        self.places = self.parameters.tensors()


class LocalSteps(CompressedSum):
    """The groups of this host, as one of its workers. Final; see :class:`~.slow_link.DiLoCo`.

    Attributes:
        groups: of this host.
    """

    def __init__(self, plan: SumPlan) -> None:
        super().__init__(plan)
        assert isinstance(plan.state.link, DiLoCo)
        self._link, self._arena = plan.state.link, plan.arena
        self.groups = [LocalGroup(plan, group) for group in plan.own]
        self._of_shard = {shard: group for group in self.groups for shard in group.shards}
        self._outer_places = plan.arena.parameters.tensors()
        self._looks_at: LocalGroup | None = None
        self._sum = GroupSum(plan, _Everything(plan), torch.float32)

    def present(self, group: LocalGroup) -> list[bool]:
        """Say for each parameter whether a shard of a group had a gradient for it."""
        return presence(self.flags(group.shards.start))

    def look_at(self, shard: int) -> None:
        """Have the model's parameters be those that a shard is computed with."""
        group = self._of_shard[shard]
        if group is not self._looks_at:
            self._looks_at = group
            self._look(group.places)

    def look_home(self) -> None:
        """Have the model's parameters be the outer ones."""
        if self._looks_at is not None:
            self._looks_at = None
            self._look(self._outer_places)

    def end_update(self) -> None:
        """Make the outer step, if it is due after a step. Collective among those of a lane."""
        if (self._plan.state.step + 1) % self._link.local_steps == 0:
            self._outer_step()

    def kept_by(self, host: int) -> list[torch.Tensor]:
        """See :class:`CompressedSum`; the first lane brings everything."""
        state, groups = self._plan.state, self._plan.groups
        if not self._plan.leads:
            return []
        numbers = [groups.index(group) for group in self._plan.held[host]]
        labels = [of(n) for n in numbers for of in (parameters_of, states_of, known_of)]
        return [state.region(label).everything() for label in labels]

    def _compress(self, present: Sequence[bool]) -> None:
        """Leave the sums of groups as they are."""

    def _look(self, places: Sequence[torch.Tensor]) -> None:
        for parameter, place in zip(self._plan.parameters, places, strict=True):
            parameter.data = place

    def _outer_step(self) -> None:
        link, pieces = self._link, self.pieces
        outer = self._arena.parameters.pieces(pieces)
        for group in self.groups:
            local = group.parameters.pieces(pieces)
            for here, there, change in zip(outer, local, group.totals, strict=True):
                torch.sub(here, there, out=change)
        self._sum.add()
        self._sum.give()
        momentum = self._plan.state.pieces(OUTER_MOMENTUM, pieces)
        for here, kept, change in zip(outer, momentum, self.totals, strict=True):
            change.div_(self._plan.state.num_groups)
            kept.mul_(link.outer_momentum).add_(change)  # as torch's SGD with `nesterov=True`
            here.sub_(change.add_(kept, alpha=link.outer_momentum), alpha=link.outer_lr)
        for group in self.groups:
            for here, there in zip(outer, group.parameters.pieces(pieces), strict=True):
                there.copy_(here)


class _Everything:
    """What groups have changed since the last outer step: all have something for all. Final."""

    def __init__(self, plan: SumPlan) -> None:
        self._plan = plan
        self._flags = bytes([1]) + bytes(len(plan.parameters))

    def flags(self, lo: int) -> bytes:
        return self._flags

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return self._plan.sums(lo, pieces)

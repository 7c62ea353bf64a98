"""Workers that each have a replica; parts travel through the host's memory, and everybody updates.

::

    worker 0   part ──►┌────────────────┐──► all parts, added in tree order ──► update of the whole
    worker 1   part ──►│ host's memory  │──► all parts, added in tree order ──► update of the whole
                       └────────────────┘

Every worker makes the same additions and the same update, so replicas stay the same, bit for bit.
No replica is ever torn: once all parts are gathered, whoever is lost takes nothing with it, and the
others go on without going back. Whoever joins takes its replica from the newest snapshot.

The way of devices that do not see the host's memory. On CPUs it is slower than
:mod:`unisono.exchange.shared`, as everybody adds up and updates everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.exchange.buffers import Buffers
from unisono.exchange.division import Division
from unisono.exchange.homes import Homes
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import Gradients, Parts
from unisono.exchange.run_memory import RunMemory
from unisono.plan.slices import Piece, cut
from unisono.plan.summation import Node
from unisono.state.contents import fixed_parameters, named_parameters, updated_parameters
from unisono.state.optimizer_state import apply_state, take_state
from unisono.workers.launcher_messages import Live
from unisono.workers.team import Team


class StagedExchange:
    """An :class:`unisono.exchange.protocol.Exchange` of replicas. Final.

    Args:
        model, optimizer, shards, team, new_key, previous, live: as for
            :class:`unisono.exchange.shared.SharedExchange`.
    """

    homes: Homes | None = None
    acts = have_all = True
    is_lost = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        shards: int,
        team: Team,
        new_key: int,
        previous: RunMemory | None = None,
        live: Live | None = None,
    ) -> None:
        self._model, self._optimizer, self._team = model, optimizer, team
        self.parameters = list(updated_parameters(model, optimizer).values())
        self.fixed = fixed_parameters(model, optimizer)
        self._all = [*self.parameters, *self.fixed]
        self._numels = [parameter.numel() for parameter in self._all]
        self.buffers = Buffers(model)
        loop = None if live is None else live.loop
        self.memory = RunMemory(
            model,
            optimizer,
            self.parameters,
            self.fixed,
            self.buffers,
            [{} for _ in self.parameters],
            [],
            shards=shards,
            team=team,
            key=None if loop is None else loop["key"],
            previous=previous,
            new_key=new_key,
        )
        self._parts = Parts(self.memory.arena)
        for parameter in self._all:
            # Laid out as everybody's are, whatever the program has made of it.
            parameter.data = parameter.data.clone()
        if loop is None:
            self._begin()
        else:
            self._load()
        numels = [parameter.numel() for parameter in self.parameters]
        self.division = Division(team, shards, numels)
        self._everything = [Piece(index, 0, numel) for index, numel in enumerate(numels)]
        self._plan_sum()

    @property
    def pieces(self) -> Sequence[Piece]:
        """See :class:`Exchange`."""
        return self._everything

    @property
    def totals(self) -> Sequence[torch.Tensor]:
        """See :class:`Exchange`."""
        return self._sum.totals

    def divide(self) -> None:
        """See :class:`Exchange`."""
        self.division.divide()
        self._plan_sum()

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`Exchange`."""
        self._parts.publish(part, gradients)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`Exchange`."""
        if self._team.meet(purpose):
            return None
        more = self.division.take_over()
        self._plan_sum()
        return more

    def add_up(self) -> tuple[bool, ...]:
        """See :class:`Exchange`."""
        return self._sum.add()

    def all_sums(self, purpose: str) -> bool:
        """See :class:`Exchange`; they are all here."""
        return True

    def are_read(self, purpose: str) -> bool:
        """See :class:`Exchange`; nobody else reads them."""
        return True

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """See :class:`Exchange`; all say the same."""
        return [value]

    def share(self, purpose: str) -> bool:
        """See :class:`Exchange`; whoever was lost had nothing that the others have not."""
        # Parts of the next step may be published once everybody has read these.
        self._team.meet(purpose)
        return True

    def save(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, alone: bool = False
    ) -> int:
        """See :class:`Exchange`."""
        team, snapshots = self._team, self.memory.snapshots
        position, size = (0, 1) if alone else (team.position, team.size)
        slot = snapshots.begin()
        self._copy_replica(slot, cut(self._numels, size)[position], into_slot=True)
        if position == 0:
            snapshots.copy_buffers(slot, self.buffers.now, into_slot=True)
        if team.is_leader:
            self.memory.describe(slot, facts, tensors)
        return slot

    def load(self) -> None:
        """See :class:`Exchange`."""
        self._load()
        self.divide()

    def hand_out(self) -> None:
        """See :class:`Exchange`; everybody has all."""

    def hand_round(self) -> None:
        """See :class:`Exchange`; everybody has all."""

    def trust_leader(self) -> None:
        """See :class:`Exchange`; the leader has nothing of its own."""

    def unbind(self) -> None:
        """See :class:`Exchange`."""
        for parameter in self._all:
            parameter.grad = None
        self.buffers.unbind()

    def _plan_sum(self) -> None:
        division = self.division
        self._sum = OrderedSum(
            self._parts,
            division.parts,
            division.num_shards,
            self._everything,
            in_place=self._team.size == 1,
        )
        self.whole = [
            total.as_strided(parameter.shape, parameter.stride())
            for total, parameter in zip(self._sum.totals, self.parameters, strict=True)
        ]

    def _begin(self) -> None:
        """Have everybody take the leader's values, by way of a snapshot that is none yet."""
        team, memory = self._team, self.memory
        while True:
            leader, slot = team.membership.leader, memory.snapshots.begin()
            if team.is_leader:
                self._copy_replica(slot, cut(self._numels, 1)[0], into_slot=True)
                tensors, numbers = take_state(self._optimizer, self._named())
                memory.describe(slot, {"numbers": numbers}, tensors)
                self.buffers.give()
            team.meet("sharing parameters")
            if team.membership.leader == leader:
                break
        if not team.is_leader:
            self._take(slot)
        self.buffers.load(0)
        team.meet("shared parameters")

    def _load(self) -> None:
        """Take all from the newest snapshot."""
        memory, slot = self.memory, self.memory.newest_slot
        copy_of_buffers = memory.copy_of_buffers
        memory.snapshots.copy_buffers(slot, copy_of_buffers, into_slot=False)
        self.buffers.load(copy_of_buffers)
        self._take(slot)

    def _take(self, slot: int) -> None:
        """Take parameters and the optimizer's state from a slot."""
        self._copy_replica(slot, cut(self._numels, 1)[0], into_slot=False)
        snapshots = self.memory.snapshots
        self._optimizer.state.clear()
        apply_state(self._optimizer, self._named(), snapshots.facts(slot), snapshots.extra(slot))

    def _copy_replica(self, slot: int, pieces: Sequence[Piece], *, into_slot: bool) -> None:
        """Copy pieces of parameters to or from a snapshot; fixed ones are counted behind others."""
        kept = self.memory.snapshots.parameters(slot)
        with torch.no_grad():
            for piece in pieces:
                elements = slice(piece.start, piece.stop)
                here = _in_memory_order(self._all[piece.index])[elements]
                there = _in_memory_order(kept[piece.index])[elements]
                there.copy_(here) if into_slot else here.copy_(there)

    def _named(self) -> dict[str, nn.Parameter]:
        return named_parameters(self._model, self._optimizer)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's elements as a vector, in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))

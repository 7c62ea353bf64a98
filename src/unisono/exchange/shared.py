"""Workers of one host that share everything: one copy of the parameters, in shared memory.

Each worker adds up and updates its pieces where they lie, and nothing has to be sent. While a loop
is under way parameters' ``.data`` are views of the arena. Between the two meetings of a step they
change; a worker that is lost there leaves them torn, and the newest snapshot is put back.

Optimizers that are not element-wise cannot work on pieces: the leader updates whole parameters for
all and alone has their state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import CheckpointError
from unisono.exchange.buffers import Buffers
from unisono.exchange.division import Division
from unisono.exchange.homes import Homes, plan_state
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import Gradients, Parts
from unisono.exchange.run_memory import RunMemory
from unisono.plan.slices import Piece
from unisono.plan.summation import Node
from unisono.state.contents import fixed_parameters, named_parameters, updated_parameters
from unisono.state.optimizer_state import apply_state, check_told, group_options, take_state
from unisono.state.optimizers import is_elementwise
from unisono.state.saved import apply_groups
from unisono.workers.launcher_messages import Live
from unisono.workers.team import Team


class SharedExchange:
    """An :class:`unisono.exchange.protocol.Exchange` through memory that all see. Final.

    Args:
        model: shared by all workers while bound.
        optimizer: the user's.
        shards: S.
        team: the workers.
        new_key: names the memory, where a new one is needed.
        previous: the memory of an earlier loop of the same run.
        live: how this worker joins a loop that the others are in; None: it begins with them.
    """

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
        self.buffers = Buffers(model)
        is_sliced = is_elementwise(optimizer)
        keys, states = (
            plan_state(optimizer, self.parameters)
            if is_sliced
            else ([{} for _ in self.parameters], [])
        )
        loop = None if live is None else live.loop
        self.memory = RunMemory(
            model,
            optimizer,
            self.parameters,
            self.fixed,
            self.buffers,
            keys,
            states,
            shards=shards,
            team=team,
            key=None if loop is None else loop["key"],
            previous=previous,
            new_key=new_key,
        )
        arena = self.memory.arena
        self._shared = Homes(arena, keys)
        self.homes = self._shared if is_sliced else None
        self._places = [*arena.parameters.tensors(), *arena.fixed.tensors()]
        self._parts = Parts(arena)
        self.whole = arena.gradients[0].tensors()
        if live is not None and loop is not None:
            self._join(is_alone=live.is_alone)
        else:
            self._begin()
        self.trust_leader()
        self.division = Division(team, shards, [p.numel() for p in self.parameters])
        self._plan_sum()

    @property
    def acts(self) -> bool:
        """See :class:`Exchange`."""
        return self.homes is not None or self._team.is_leader

    @property
    def is_lost(self) -> bool:
        """See :class:`Exchange`."""
        return self.homes is None and self._team.membership.leader != self._leader

    @property
    def have_all(self) -> bool:
        """See :class:`Exchange`."""
        return self.homes is not None

    @property
    def pieces(self) -> Sequence[Piece]:
        """See :class:`Exchange`."""
        return self._sum.pieces

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
        """See :class:`Exchange`."""
        return self._team.meet(purpose)

    def are_read(self, purpose: str) -> bool:
        """See :class:`Exchange`."""
        return self._team.meet(purpose)

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """See :class:`Exchange`."""
        membership = self._team.membership
        heard = self._team.gather(value, purpose)
        return list(heard.values()) if self._team.membership == membership else None

    def share(self, purpose: str) -> bool:
        """See :class:`Exchange`."""
        return self._team.meet(purpose)

    def save(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, alone: bool = False
    ) -> int:
        """See :class:`Exchange`."""
        team = self._team
        share = (0, 1) if alone else (team.position, team.size)
        slot = self.memory.snapshots.copy(self.buffers.now, *share)
        if team.is_leader:
            self.memory.describe(slot, facts, tensors)
        return slot

    def load(self) -> None:
        """See :class:`Exchange`."""
        self._put_back()
        self.buffers.load(self.memory.copy_of_buffers)
        for parameter in self.parameters:
            self._optimizer.state.pop(parameter, None)
        self._load_optimizer()
        self.trust_leader()
        self.divide()

    def hand_out(self) -> None:
        """See :class:`Exchange`."""
        if not self.have_all:
            self._take_optimizer(*self.memory.newest())

    def hand_round(self) -> None:
        """See :class:`Exchange`."""
        if self.have_all or self._team.size == 1:
            return
        snapshots = self.memory.snapshots

        def speak() -> bytes:
            try:
                check_told(self._optimizer)
                tensors, numbers = take_state(self._optimizer, self._named_whole())
                facts = {"numbers": numbers, "groups": group_options(self._optimizer)}
                self.memory.describe(0, facts, tensors)
            except (CheckpointError, ValueError):
                return b""
            return b"described"

        is_there = self._team.hear_leader(speak, "end of a loop")
        if is_there and not self._team.is_leader:
            self._take_optimizer(snapshots.facts(0), snapshots.extra(0))

    def trust_leader(self) -> None:
        """See :class:`Exchange`."""
        self._leader = self._team.membership.leader

    def unbind(self) -> None:
        """See :class:`Exchange`."""
        for parameter in self._all:
            parameter.data = parameter.data.clone()
            parameter.grad = None
        for parameter in self.parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.clone()
        self.buffers.unbind()

    def _plan_sum(self) -> None:
        division = self.division
        self._sum = OrderedSum(
            self._parts, division.parts, division.num_shards, division.pieces, in_place=True
        )

    def _begin(self) -> None:
        """Put the leader's values into the arena and let every worker's model look at them."""
        team = self._team
        while True:
            leader = team.membership.leader
            if team.is_leader:
                with torch.no_grad():
                    for place, parameter in zip(self._places, self._all, strict=True):
                        place.copy_(parameter)
                    self._share_optimizer()
                self.buffers.give()
            team.meet("sharing parameters")
            if team.membership.leader == leader:
                break
        self._look(copy_of_buffers=0)

    def _join(self, *, is_alone: bool) -> None:
        """Look at the arena that the others use, or have used."""
        if is_alone:
            self._put_back()
        self._look(copy_of_buffers=self.memory.copy_of_buffers)
        self._optimizer.state.clear()
        self._load_optimizer()

    def _look(self, *, copy_of_buffers: int) -> None:
        for place, parameter in zip(self._places, self._all, strict=True):
            parameter.data = place
        self.buffers.load(copy_of_buffers)

    def _put_back(self) -> None:
        """Copy the newest snapshot over the arena, each worker its share."""
        team, memory = self._team, self.memory
        slot, copy_of_buffers = memory.newest_slot, memory.copy_of_buffers
        while True:
            memory.snapshots.put_back(slot, copy_of_buffers, team.position, team.size)
            if team.meet("putting back"):
                return

    def _load_optimizer(self) -> None:
        """Take what is not in the arena of the optimizer's state from the newest snapshot."""
        if self.acts:
            apply_state(self._optimizer, self._named_whole(), *self.memory.newest())

    def _take_optimizer(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        apply_state(self._optimizer, self._named_whole(), facts, tensors)
        apply_groups(facts["groups"], self._optimizer)  # its step may change options

    def _named_whole(self) -> dict[str, nn.Parameter]:
        """Name the parameters whose optimizer state is not in the arena."""
        return {} if self.homes is not None else named_parameters(self._model, self._optimizer)

    def _share_optimizer(self) -> None:
        flags = bytearray(len(self.parameters))
        for index, parameter in enumerate(self.parameters):
            state = self._optimizer.state.get(parameter, {})
            keys = self._shared.keys[index]
            there = {name for name in keys if state.get(name) is not None}
            if there and there != keys.keys():
                raise ValueError(
                    f"an optimizer's state must fit its options, but for these it keeps "
                    f"{sorted(keys)} and has {sorted(there)}: clear `optimizer.state` "
                    f"after such a change, or leave the options."
                )
            if there:
                flags[index] = 1
                for name, home in self._shared.state(index).items():
                    home.copy_(state[name])
        self._shared.known = bytes(flags)

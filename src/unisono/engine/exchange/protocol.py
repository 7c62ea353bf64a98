"""The seam between a step and whatever carries its gradients: what every exchange does.

::

    publish_early…    where the exchange takes them: gradients of a worker's last part, one by one
    publish(part)…    each worker its parts, one after the other
    gather            ─── all meet ───  or: somebody was lost, these are computed here
    add_up            the sums of this worker's pieces, in tree order
    all_sums, agree   where something needs more than its own pieces: a norm, a vote
    share             ─── all meet ───  what was updated is everybody's

Published parts, records, buffers and snapshots are in the host's memory whatever the exchange is,
so it is known who has done what when a worker is lost (:class:`RunMemory`). The exchange is not
part of a run's identity: one may save what another loads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.buffers import Buffers
from unisono.engine.exchange.moving import Moving, replace_data
from unisono.engine.exchange.parts import Gradients, OrderedSum, Parts
from unisono.engine.exchange.references import References
from unisono.engine.exchange.shared_optimizer_state import Division, PiecesOfState, StateKeys
from unisono.engine.exchange.snapshots import RunMemory, plan_of
from unisono.engine.state.contents import named_parameters, updated_parameters
from unisono.engine.state.optimizer_state import apply_state, check_told, group_options, take_state
from unisono.engine.state.saved import apply_groups
from unisono.errors import CheckpointError
from unisono.plan.shards import Piece, cut
from unisono.plan.summation import Node
from unisono.runtime.device import Device, host, on_host
from unisono.runtime.workers.launcher_messages import Live
from unisono.runtime.workers.team import StepBrokenError, Team


class Exchange(ABC):
    """Carries the gradients of one loop. Every method but `publish` is collective.

    Args:
        new_key: names the memory, where that of an earlier loop (`previous`) does not fit.
        live: how this worker joins a loop that the others are in; None: it begins with them.

    Attributes:
        parameters: those that the optimizer updates, in an order that is the same everywhere.
        fixed: those that it does not.
        optimizer_state: in pieces; None: whoever updates has all of it in its own optimizer.
        is_in_pieces: whether nobody but this worker has the state of its pieces.
        have_all: whether every worker has the whole state; else the leader alone updates, and has
            the optimizer's state.
        takes_early: whether :meth:`publish_early` is of use now.
        is_state_new: whether the program has changed what lies in `optimizer_state`.
        is_written_in_passes: whether passes have written to parameters what was there.
        pieces: what this worker adds up: pieces of the parameters, or all of them whole.
        totals: the sums over `pieces`, as vectors.
        whole: the sums of all parameters, as those lie; see :meth:`all_sums`.
    """

    optimizer_state: PiecesOfState | None = None
    is_in_pieces = False
    have_all = True
    takes_early = False
    is_state_new = False
    is_written_in_passes = False
    pieces: Sequence[Piece]
    totals: Sequence[torch.Tensor]
    whole: list[torch.Tensor]
    _sum: OrderedSum

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        shards: int,
        team: Team,
        device: Device | None = None,
        new_key: int,
        previous: RunMemory | None = None,
        live: Live | None = None,
    ) -> None:
        self._model, self._optimizer, self._team = model, optimizer, team
        self.device = device or host()
        self.copies = self.device.copies()
        updated = updated_parameters(model, optimizer)
        named = named_parameters(model, optimizer)
        fixed = {name: named[name] for name in named if name not in updated}
        self.parameters, self.fixed = list(updated.values()), list(fixed.values())
        self._all, self._names = [*self.parameters, *self.fixed], [*updated, *fixed]
        self.references = References(self._all, model.buffers())
        self.buffers = Buffers(model, self.device, self.copies)
        keys, states = self._plan_state(updated)
        loop = None if live is None else live.loop
        self.memory = RunMemory(
            plan_of(updated, fixed, states, self.buffers.slots, shards),
            keys,
            team,
            key=None if loop is None else loop["key"],
            previous=previous,
            new_key=new_key,
        )
        self.buffers.bind(self.memory.arena)
        self._parts = Parts(self.memory.arena.flags, self.memory.arena.gradients)
        try:
            self._bind(keys, None if loop is None else live)
        except StepBrokenError:
            self.unbind()
            raise
        self.references.show()
        self._bound = [parameter.data for parameter in self._all]
        self._addresses = list(map(torch.Tensor.data_ptr, self._bound))
        if fixed:
            self.buffers.moving = Moving(
                fixed, self.memory.arena, self._fixed_values, self._fixed_suspects
            )
        self.trust_leader()
        self.division = Division(team, shards)
        self._plan_sum()

    @property
    def acts(self) -> bool:
        """Whether this worker updates."""
        return self.have_all or self._team.is_leader

    @property
    def is_lost(self) -> bool:
        """Whether what only one worker had was lost with it, and the run has to go back."""
        return not self.have_all and self._team.membership.leader != self._leader

    def trust_leader(self) -> None:
        """Treat the present leader's state as the run's."""
        self._leader = self._team.membership.leader

    def divide(self) -> None:
        """Divide the work anew among those who are members now."""
        self.division.divide()
        self._plan_sum()

    def publish(self, part: Node, gradients: Gradients) -> None:
        """Show the others a part of this worker's, or raise TypeError: a gradient is sparse."""
        self._parts.publish(part, gradients)

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Show the others one parameter of this worker's last part, while a backward pass goes on.

        The part is published as a whole nevertheless, which counts: what comes early may be only
        some parameters, in any order, and one of them twice. A gradient that is the same tensor
        then, unchanged, need not be copied again.
        """
        raise NotImplementedError("this exchange takes nothing early")

    def gather(self, purpose: str) -> list[Node] | None:
        """Meet the others once this worker's parts are published; None if all are there.

        Else a worker was lost: publish these, too (maybe none), and call this again.
        """
        if self._team.meet(purpose):
            return None
        more = self.division.take_over()
        self._plan_sum()
        return more

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """Add up :attr:`pieces` of all parts, in tree order.

        Gives for each parameter whether any shard had a gradient for it; else it has no sum.
        """
        return self._sum.add()

    def all_sums(self, purpose: str) -> bool:
        """Wait until :attr:`whole` has everybody's sums; False if somebody was lost."""
        return self._team.meet(purpose)

    def are_read(self, purpose: str) -> bool:
        """Wait until everybody has read :attr:`whole`, before own sums are changed; likewise."""
        return self._team.meet(purpose)

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """Collect a value from all whose sums this worker does not have; the same list for all.

        None if somebody was lost.
        """
        membership = self._team.membership
        heard = self._team.gather(value, purpose)
        return list(heard.values()) if self._team.membership == membership else None

    def share(self, purpose: str) -> bool:
        """Make what this worker and the others have updated everybody's.

        False if somebody was lost and :meth:`load` has to be called.
        """
        return self._team.meet(purpose)

    def take_changes(self, *, alone: bool = False) -> None:
        """Make what the program has changed between two steps everybody's, as all have.

        Collective, if anything was changed and not `alone`; see :meth:`save`.

        Raises:
            MismatchError: not every worker has made the same changes, as far as that is known.
            ValueError: a parameter's ``.data`` has another shape or dtype now.
        """
        self.references.take()
        if list(map(torch.Tensor.data_ptr, self._all)) == self._addresses:
            return
        for name, parameter, place in zip(self._names, self._all, self._bound, strict=True):
            replace_data(name, parameter, place)

    def replica(self) -> int:
        """Hash this worker's replica of parameters and optimizer state; 0: there is none alone."""
        return 0

    def check_replicas(self, seen: Collection[int]) -> None:
        """Raise MismatchError where replicas are not the same, by what :meth:`replica` gave."""
        return

    def changed_name(self) -> str:
        """Name a parameter that the program has changed since :meth:`take_changes`, if known."""
        return ""

    def updating(self) -> AbstractContextManager[None]:
        """Let an optimizer update whole parameters inside the block, for all who share them."""
        return nullcontext()

    def take_fixed(self) -> None:
        """See what a whole update elsewhere has changed of parameters without an optimizer."""
        return

    def give_changes(self, *, alone: bool = False) -> None:
        """Show all what the program has changed since the step, before :meth:`save`."""
        self.references.take()
        self.buffers.publish(self._team, alone=alone)

    def save(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, alone: bool = False
    ) -> int:
        """Copy the state into a snapshot, each worker a share; nobody is met.

        Args:
            facts, tensors: what is to be kept beside it, of the leader of a host.
            alone: copy all of it; not collective then.

        Returns:
            The slot; it is whole once everybody has done so.
        """
        team = self._team
        here = team.neighbours
        position, size = (0, 1) if alone else (here.index(team.world.rank), len(here))
        slot = self.memory.snapshots.begin()
        self._copy(slot, self.buffers.now, position, size, into_slot=True)
        if team.leads_host:
            self._describe(slot, facts, tensors)
        return slot

    def load(self) -> None:
        """Make the newest snapshot the present state."""
        self._load()
        self.references.show()
        self.trust_leader()
        self.divide()

    def hand_out(self) -> None:
        """Give every worker the state that only one had, from the newest snapshot, at a loop's end.

        Not collective.
        """
        if not self.have_all:
            self._take_optimizer(*self.memory.newest())

    def hand_round(self) -> None:
        """Give every worker the state that only one had, where there is no snapshot.

        State that cannot be kept stays where it is.
        """
        if self.have_all or self._team.size == 1:
            return
        said = self._team.hear_host_leaders(self._describe_optimizer, "end of a loop")
        if said[self._team.host] and not self.acts:
            snapshots = self.memory.snapshots
            self._take_optimizer(snapshots.facts(0), snapshots.extra(0))

    def _describe_optimizer(self) -> bytes:
        """Put this worker's state of the optimizer where others of its host find it, if it can."""
        try:
            check_told(self._optimizer)
            tensors, numbers = take_state(self._optimizer, self._named_whole())
            facts = {"numbers": numbers, "groups": group_options(self._optimizer)}
            self._describe(0, facts, tensors)
        except (CheckpointError, ValueError):
            return b""
        return b"described"

    def forget_gradients(self) -> None:
        """Give the memory of all parts and sums back, as a loop ends and all have read them."""
        if self.device.is_host:  # else it is pinned
            self.memory.arena.forget_gradients()

    def unbind(self) -> None:
        """Give the model tensors of its own again; not collective. Values stay as they are."""
        for parameter in self._all:
            parameter.grad = None
        self.references.close()
        self.buffers.unbind()

    def _describe(
        self, slot: int, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        facts = {**facts, "copy of buffers": self.buffers.now}
        self.memory.snapshots.describe(slot, facts, tensors)

    def _take_optimizer(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        apply_state(self._optimizer, self._named_whole(), facts, tensors)
        apply_groups(facts["groups"], self._optimizer)  # its step may change options

    def _named_whole(self) -> dict[str, nn.Parameter]:
        """Name the parameters whose optimizer state is not in the arena."""
        if self.optimizer_state is not None:
            return {}
        return named_parameters(self._model, self._optimizer)

    def _plan_state(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[StateKeys, dict[str, torch.Tensor]]:
        """List the optimizer state that is to lie in memory that all see; by default none does."""
        return [{} for _ in parameters], {}

    def _fixed_values(self) -> Sequence[torch.Tensor]:
        """Return the parameters without an optimizer, in other memory of the host."""
        return [on_host(parameter.detach()).clone() for parameter in self.fixed]

    def _fixed_suspects(self) -> Sequence[int]:
        """Return which of them may have been changed since the loop began, by position."""
        return range(len(self.fixed))

    @abstractmethod
    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        """Begin the loop with the others, or join it, so that all have the same state."""

    @abstractmethod
    def _load(self) -> None:
        """Take the state from the newest snapshot."""

    @abstractmethod
    def _copy(
        self, slot: int, copy_of_buffers: int, position: int, size: int, *, into_slot: bool
    ) -> None:
        """Copy a share of the state to or from a snapshot; see :meth:`Snapshots.copy`."""

    def _cut(self, num_workers: int) -> list[list[Piece]]:
        """Divide parameters among those who add them up."""
        return cut([parameter.numel() for parameter in self.parameters], num_workers)

    @abstractmethod
    def _plan_sum(self) -> None:
        """Be ready to add up what is this worker's now."""

"""The interface between a step and the exchange of its gradients.

::

    publish_early…    where the carriage takes them: gradients of a worker's last part, one by one
    publish(part)…    each worker its parts, one after the other
    gather            ─── barrier ───  or: a worker was lost, these parts are computed here
    add_up            the sums of this worker's pieces, in tree order
    all_sums, agree   for what needs more than one worker's pieces: a norm, a vote
    share             ─── barrier ───  the update is published to all workers

An exchange has three parts, each independent of the others' implementation:

========= ======================================= ================================================
part      decides                                 implementations
========= ======================================= ================================================
carriage  where a worker's parts are, and how it  the host's memory (``host_memory.py``), with
          gets slices of the others'              copies from and to devices; a process group
                                                  (``group_carriage.py``)
between   how sums cross hosts                    one host (``between.py``); lanes (``lanes.py``)
ownership who updates what, and whose loss loses  one copy for all (``shared_copy.py``); replicas
          state                                   (``replicas.py``); pieces (``owned_pieces.py``)
========= ======================================= ================================================

Records, buffers, snapshots and the flags of parts are in the host's memory with every carriage, so
the survivors of a loss know what was done (:class:`RunMemory`). The exchange is not part of a run's
identity: one may load what another saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.between import Between, OneHost
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.division import Division
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.moving import Moving
from unisono.engine.exchange.ownership import Ownership
from unisono.engine.exchange.parts import Gradients
from unisono.engine.exchange.shared_optimizer_state import PiecesOfState
from unisono.engine.exchange.snapshots import RunMemory, plan_of
from unisono.plan.shards import Piece
from unisono.plan.summation import Node
from unisono.runtime.device import Device, host
from unisono.runtime.workers.launcher_messages import Live
from unisono.runtime.workers.team import Team


class ExchangeKind(NamedTuple):
    """The carriage and the ownership of an exchange; the job decides what is between hosts."""

    carriage: Callable[[LoopLayout, Between], Carriage]
    ownership: type[Ownership]


@final
class Exchange:
    """Carries the gradients of one loop. Every method but `publish` is collective.

    Args:
        kind: the parts of the exchange.
        new_key: names new memory, used if that of an earlier loop (`previous`) does not fit.
        live: the loop of the others that this worker joins; None: all begin together.

    Attributes:
        parameters: those that the optimizer updates, in the same order on every worker.
        fixed: the other parameters.
        division: which worker computes which shards.
    """

    def __init__(
        self,
        kind: ExchangeKind,
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
        self.kind, self._team, self.device = kind, team, device or host()
        self._layout = layout = LoopLayout(model, optimizer, team, self.device)
        self.copies, self.buffers = layout.copies, layout.buffers
        self.references = layout.references
        self.parameters, self.fixed = layout.parameters, [*layout.fixed.values()]
        keys, states = kind.ownership.plan_state(optimizer, layout.updated)
        loop = None if live is None else live.loop
        self.memory = layout.memory = RunMemory(
            plan_of(layout.updated, layout.fixed, states, self.buffers.slots, shards),
            keys,
            team,
            key=None if loop is None else loop["key"],
            previous=previous,
            new_key=new_key,
        )
        self.buffers.bind(self.memory.arena)
        self._between = between_hosts(layout)
        self._carriage = kind.carriage(layout, self._between)
        self._ownership = kind.ownership(layout, self._carriage, self._between)
        if live is not None and loop is not None:
            self.memory.snapshots.complete_up_to(live.snapshot)
        self._ownership.bind(keys, None if loop is None else live)
        self.references.show()
        layout.note_places()
        if self.fixed:
            own = self._ownership
            self.buffers.moving = Moving(
                layout.fixed, self.memory.arena, own.fixed_values, own.fixed_suspects
            )
        self.trust_leader()
        self.division = layout.division = Division(team, shards)
        self._ownership.plan()

    @property
    def optimizer_state(self) -> PiecesOfState | None:
        """The optimizer's state in pieces; None if workers that update have all of it."""
        return self._ownership.optimizer_state

    @property
    def is_in_pieces(self) -> bool:
        """Whether no other worker has the state of this worker's pieces."""
        return self._ownership.is_in_pieces

    @property
    def have_all(self) -> bool:
        """Whether every worker has the whole state; else one of each host updates for all."""
        return self._ownership.have_all

    @property
    def acts(self) -> bool:
        """Whether this worker updates."""
        return self.have_all or self._team.leads_host

    @property
    def is_lost(self) -> bool:
        """Whether state that only one worker had was lost with it, so the run must go back."""
        return self._ownership.is_lost

    @property
    def is_written_in_passes(self) -> bool:
        """Whether passes have written to parameters without changing their values."""
        return self._ownership.is_written_in_passes

    @property
    def takes_early(self) -> bool:
        """Whether :meth:`publish_early` speeds up the step now."""
        return self._carriage.takes_early

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of parameters that this worker adds up, or all parameters."""
        return self._carriage.pieces

    @property
    def totals(self) -> Sequence[torch.Tensor]:
        """The sums of `pieces`, as vectors."""
        return self._carriage.totals

    @property
    def whole(self) -> list[torch.Tensor]:
        """The sums of all parameters in their shapes; see :meth:`all_sums`."""
        return self._carriage.whole

    def trust_leader(self) -> None:
        """Treat the state of the current members as the run's."""
        self._ownership.trust()

    def divide(self) -> None:
        """Divide the work among the current members."""
        self.division.divide()
        self._ownership.plan()

    def publish(self, part: Node, gradients: Gradients) -> None:
        """Publish a part of this worker. Raise TypeError if a gradient is sparse."""
        self._carriage.publish(part, gradients)

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Publish one parameter of this worker's last part during its backward pass.

        The whole part must still be published, and that is what counts: early gradients may be of
        some parameters only, in any order and repeated. Unchanged ones are not copied again.
        """
        self._carriage.publish_early(part, index, gradient)

    def gather(self, purpose: str) -> list[Node] | None:
        """Wait until every worker has published its parts; return None once all are published.

        Otherwise a worker was lost: publish the parts that are returned (there may be none), and
        call this again.
        """
        if self._carriage.gather(purpose):
            return None
        more = self.division.take_over()
        self._ownership.plan()
        return more

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """Add up :attr:`pieces` of all parts, in tree order.

        Returns:
            For each parameter, whether any shard had a gradient; without one it has no sum.
        """
        return self._carriage.add_up(purpose)

    def all_sums(self, purpose: str) -> bool:
        """Wait until :attr:`whole` has the sums of all workers; return False if one was lost."""
        return self._ownership.all_sums(purpose)

    def are_read(self, purpose: str) -> bool:
        """Wait until all workers have read :attr:`whole`; return False if one was lost."""
        return self._ownership.are_read(purpose)

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """Return the values of all workers with separate sums; None if a worker was lost."""
        return self._ownership.agree(value, purpose)

    def share(self, purpose: str) -> bool:
        """Publish the update to all workers.

        Return False if a worker was lost during it, so that :meth:`load` has to be called.
        """
        return self._ownership.share(purpose)

    def publish_changes(self, *, alone: bool = False) -> None:
        """Publish changes that the program made between two steps, identically on all workers.

        Collective if anything was changed, unless `alone`; see :meth:`save`.

        Raises:
            MismatchError: workers are known to have made different changes.
            ValueError: the shape or dtype of a parameter's ``.data`` has changed.
        """
        self._layout.take_replaced()
        self._ownership.publish_changes(alone=alone)

    def pop_new_state(self) -> bool:
        """Return whether the program has changed the optimizer's state since the last call."""
        is_new, self._ownership.is_state_new = self._ownership.is_state_new, False
        return is_new

    def replica(self) -> int:
        """Return a hash of this worker's replica of the state; 0 if there is none."""
        return self._ownership.replica()

    def check_replicas(self, seen: Collection[int]) -> None:
        """Raise MismatchError if the hashes of :meth:`replica` differ between workers."""
        self._ownership.check_replicas(seen)

    def changed_name(self) -> str:
        """Return the name of a parameter that changed since :meth:`publish_changes`, if known."""
        return self._ownership.changed_name()

    def updating(self) -> AbstractContextManager[None]:
        """Allow an optimizer to update whole parameters inside the block, for all workers."""
        return self._ownership.updating()

    def load_fixed(self) -> None:
        """Load changes of fixed parameters by a whole update on another worker."""
        self._ownership.load_fixed()

    def publish_before_save(self, *, alone: bool = False) -> None:
        """Publish changes that the program made since the step, before :meth:`save`."""
        self._ownership.publish_before_save(alone=alone)
        self.references.take()
        self.buffers.publish(self._team, alone=alone)

    def save(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, alone: bool = False
    ) -> int:
        """Copy the state into a snapshot, each worker a share, without waiting for others.

        Args:
            facts, tensors: what to save beside the state, from the leader of a host.
            alone: copy everything; then this is not collective.

        Returns:
            The slot, which is whole once every worker has copied its share.
        """
        position, size = (0, 1) if alone else self._layout.share
        slot = self.memory.snapshots.begin()
        self._ownership.copy(slot, self.buffers.now, position, size)
        if self._team.leads_host:
            self._ownership.describe(slot, facts, tensors)
        return slot

    def load(self) -> None:
        """Load the newest snapshot."""
        self._ownership.load()
        self.references.show()
        self.trust_leader()
        self.divide()

    def discard_changes(self) -> None:
        """Undo what the program has changed since :meth:`load`. Not collective."""
        self._ownership.discard_changes()
        self.references.show()

    def named_whole(self) -> dict[str, nn.Parameter]:
        """Return the parameters whose optimizer state is not kept in pieces, by name."""
        return self._ownership.named_whole()

    def hand_out(self) -> None:
        """Distribute one worker's state to all from the newest snapshot. Not collective."""
        self._ownership.hand_out()

    def hand_round(self) -> None:
        """Distribute one worker's state to all without a snapshot, if it can be described."""
        self._ownership.hand_round()

    def forget_gradients(self) -> None:
        """Release the memory of parts and sums after a loop, once all workers have read them."""
        if self.device.is_host:  # else it is pinned
            self.memory.arena.forget_gradients()

    def unbind(self) -> None:
        """Move the model into separate memory; values stay the same. Not collective."""
        try:
            self._between.leave()
            self._carriage.close()
        finally:
            self._ownership.leave()
            for parameter in self._layout.all:
                parameter.grad = None
            self.references.close()
            self.buffers.unbind()


def between_hosts(layout: LoopLayout) -> Between:
    """Return the connection of this worker's host to the others, if there are any."""
    if len(layout.team.hosts) == 1:
        return OneHost(layout)
    from unisono.engine.exchange.lanes import Lanes  # needs a torch that has process groups

    return Lanes(layout)

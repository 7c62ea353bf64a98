"""Workers that each have a replica and update all of it: what such exchanges have in common.

Every worker makes the same update from the same sums, so replicas stay the same, bit for bit. No
replica is ever torn: once the sums are there, whoever is lost takes nothing with it, and the others
go on without going back. Whoever joins takes its replica from the newest snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.exchange.homes import StateKey
from unisono.exchange.protocol import Exchange
from unisono.plan.slices import Piece, cut
from unisono.state.contents import named_parameters
from unisono.state.optimizer_state import apply_state, take_state
from unisono.workers.supervisor import Live


class ReplicaExchange(Exchange):
    """An exchange of replicas; arguments as of :class:`Exchange`. Abstract: it knows no sums."""

    acts = have_all = True
    is_lost = False

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
        self._copy_replica(slot, position, size, into_slot=True)
        snapshots.copy(slot, self.buffers.now, position, size, into_slot=True, buffers_alone=True)
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

    def _bind(self, keys: Sequence[dict[str, StateKey]], live: Live | None) -> None:
        for parameter in self._all:
            # Laid out as everybody's are, whatever the program has made of it.
            parameter.data = parameter.data.clone()
        self.pieces = [Piece(n, 0, p.numel()) for n, p in enumerate(self.parameters)]
        if live is None:
            self._begin()
        else:
            self._load()

    def _begin(self) -> None:
        """Have everybody take the leader's values, by way of a snapshot that is none yet."""
        team, memory = self._team, self.memory
        while True:
            leader, slot = team.membership.leader, memory.snapshots.begin()
            if team.is_leader:
                self._copy_replica(slot, 0, 1, into_slot=True)
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
        memory.snapshots.copy(slot, copy_of_buffers, 0, 1, into_slot=False, buffers_alone=True)
        self.buffers.load(copy_of_buffers)
        self._take(slot)

    def _take(self, slot: int) -> None:
        """Take parameters and the optimizer's state from a slot."""
        self._copy_replica(slot, 0, 1, into_slot=False)
        snapshots = self.memory.snapshots
        self._optimizer.state.clear()
        apply_state(self._optimizer, self._named(), snapshots.facts(slot), snapshots.extra(slot))

    def _copy_replica(self, slot: int, position: int, size: int, *, into_slot: bool) -> None:
        """Copy a share of all parameters to or from a snapshot, `fixed` ones counted last."""
        kept = self.memory.snapshots.parameters(slot)
        pieces = cut([parameter.numel() for parameter in self._all], size)[position]
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

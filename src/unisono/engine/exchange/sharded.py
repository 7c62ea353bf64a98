"""Replicas whose workers each keep the optimizer state of their pieces alone (ZeRO-1).

::

    all parts ──► sums of my pieces ──► my pieces, updated ──► handed round ──► all parameters
                                            │
                          my pieces of the state, here and nowhere else

Whoever is lost takes its pieces of the state with it, at any time, and all go back to the newest
snapshot, which has the whole state: each worker writes its pieces there. When somebody joins, the
pieces are divided anew from there, too.

What needs all sums (a norm, ``on_gradients``) has them handed round besides.
"""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.arena import Arena, Region
from unisono.engine.exchange.parts import OwnParts
from unisono.engine.exchange.replicas import ReplicaExchange
from unisono.engine.exchange.shared_optimizer_state import (
    PiecesOfState,
    StateKeys,
    lay_down,
    place_of,
    plan_state,
)
from unisono.engine.state.optimizer_state import StateInPieces, check_in_place, move_one
from unisono.engine.state.optimizers import members_of
from unisono.plan.shards import Piece
from unisono.runtime.device import in_memory_order
from unisono.runtime.timeouts import STALL
from unisono.runtime.workers.launcher_messages import Live

_POLL_S = 0.001


class ShardedExchange(ReplicaExchange):
    """An exchange of replicas whose state is in pieces; arguments as of :class:`Exchange`.

    The optimizer is element-wise. Abstract: it hands nothing round.
    """

    is_in_pieces = True
    optimizer_state: OwnPieces
    _own: OwnParts
    _owners: frozenset[int] = frozenset()
    _taken_from: int | None = None  # the slot of a snapshot; None: the newest one

    @property
    def is_lost(self) -> bool:
        """See :class:`Exchange`; nobody else has the pieces of whoever was lost."""
        return super().is_lost or not self._owners <= {*self._team.membership.ranks}

    def trust_leader(self) -> None:
        """See :class:`Exchange`."""
        super().trust_leader()
        self._owners = frozenset(self._team.membership.ranks)

    def divide(self) -> None:
        """See :class:`Exchange`."""
        super().divide()
        if not self.is_lost:
            self.trust_leader()

    def load(self) -> None:
        """See :class:`Exchange`; nobody writes what others may still read of the lost step."""
        while len(self._team.hosts) == 1 and not self._team.meet("going back"):
            continue
        super().load()

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """See :class:`Exchange`."""
        membership = self._team.membership
        heard = self._team.gather(value, purpose)
        return list(heard.values()) if self._team.membership == membership else None

    def take_changes(self, *, alone: bool = False) -> None:
        """See :class:`Exchange`; raises RuntimeError where the optimizer's state was replaced."""
        super().take_changes(alone=alone)
        check_in_place(self._optimizer, self._shown)

    def hand_out(self) -> None:
        """See :class:`Exchange`."""
        if not self.device.is_host:
            self._release_parts()  # the whole state takes their place
        states, whose = self.memory.snapshots.states(self.memory.newest_slot)
        self.optimizer_state.leave(whose)
        for name, member in members_of(self._optimizer).items():
            if member.state is self._shown[name]:
                self.optimizer_state.make_whole(member, states)

    def unbind(self) -> None:
        """See :class:`Exchange`.

        State that nobody has handed out, as the loop was left early or there are no snapshots, is
        whole where it is looked at, once all workers of this host have left.
        """
        arena, pieces, here = self.memory.arena, self.optimizer_state, self._team.neighbours
        if not self.is_lost:
            pieces.write(arena.states)
            arena.left[here.index(self._team.world.rank)] = 1
        pieces.leave(pieces.known)
        # Nothing of this exchange: in a circle, a device's memory would wait for Python's garbage
        # collection.
        bring = functools.partial(_bring, pieces, arena.states, arena.left[: len(here)])
        for shown in self._shown.values():
            shown.bring = bring
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
        super().unbind()

    def _plan_state(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[StateKeys, dict[str, torch.Tensor]]:
        return plan_state(self._optimizer, parameters)

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        with_groups = [(parameter, groups[id(parameter)]) for parameter in self.parameters]
        self.optimizer_state = OwnPieces(self.memory.arena, keys, with_groups)
        self._shown: dict[str, Any] = {
            name: StateInPieces(member, self.optimizer_state)
            for name, member in members_of(self._optimizer).items()
        }
        super()._bind(keys, live)
        # Now: all are here, so nobody waits any more for those who left the loop before.
        self.memory.arena.left[self._team.neighbours.index(self._team.world.rank)] = 0
        for place, parameter in zip(self._room().tensors(), self.parameters, strict=True):
            if parameter.numel():
                parameter.data = place.copy_(parameter.detach())
        for name, member in members_of(self._optimizer).items():
            member.state = self._shown[name]

    def _release_parts(self) -> None:
        """Give a device's memory of parts back, which nobody reads any more."""
        self._own.release()

    @abstractmethod
    def _room(self) -> Region:
        """Give memory where parameters lie as they are handed round."""

    def _hold_state(self) -> None:
        """Have the state of this worker's pieces, once those are known."""
        snapshots = self.memory.snapshots
        slot = snapshots.newest if self._taken_from is None else self._taken_from
        self._taken_from = None
        if slot is not None:
            self.optimizer_state.hold(self.pieces, snapshots.states(slot)[0])

    def _give_state(self, slot: int) -> None:
        states, whose = self.memory.snapshots.states(slot)
        keys = self.optimizer_state.keys
        whose[:] = lay_down(self._optimizer.state, self.parameters, keys, states)
        self._take_state(slot)
        super()._give_state(slot)

    def _take_state(self, slot: int) -> None:
        self.optimizer_state.known[:] = self.memory.snapshots.states(slot)[1]
        self.optimizer_state.forget()
        self._taken_from = slot

    def _copy(
        self, slot: int, copy_of_buffers: int, position: int, size: int, *, into_slot: bool
    ) -> None:
        super()._copy(slot, copy_of_buffers, position, size, into_slot=into_slot)
        if into_slot:
            states, whose = self.memory.snapshots.states(slot)
            self.optimizer_state.write(states)
            whose[:] = self.optimizer_state.known


def _bring(pieces: OwnPieces, states: Region, left: memoryview, optimizer: Optimizer) -> None:
    """Make the state of an optimizer whole, of what all have left behind."""
    until_s = time.monotonic() + STALL.in_s()
    while not all(left):
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"`optimizer.state` is whole once every worker has left its loop, but after "
                f"{STALL.in_s():.0f} s only {sum(left)} of {len(left)} have: leave it on all "
                f"workers alike, or start the program again, which resumes."
            )
        time.sleep(_POLL_S)
    pieces.make_whole(optimizer, states)


class OwnPieces(PiecesOfState):
    """This worker's pieces of the optimizer's state, where its parameters are. Final.

    Args:
        arena: says which parameters have state.
        keys: of the state.
        parameters: with the options of the group of each.
    """

    def __init__(
        self,
        arena: Arena,
        keys: StateKeys,
        parameters: Sequence[tuple[nn.Parameter, Mapping[str, Any]]],
    ) -> None:
        self.keys, self.known = keys, arena.whose
        self._parameters = parameters
        self._held: dict[Piece, dict[str, Any]] = {}

    def parameter(self, piece: Piece) -> torch.Tensor:
        """See :class:`PiecesOfState`."""
        return in_memory_order(self._parameters[piece.index][0])[piece.start : piece.stop]

    def of_piece(self, piece: Piece) -> dict[str, Any]:
        """See :class:`PiecesOfState`."""
        return self._held[piece]

    def adopt(self, piece: Piece, state: dict[str, Any]) -> None:
        """See :class:`PiecesOfState`; it stays where it is."""
        self._held[piece] = state
        if piece.is_first:
            self.known[piece.index] = 1

    def show(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, index: int) -> None:
        """See :class:`PiecesOfState`; no worker can."""

    def here(self) -> list[dict[str, Any]]:
        """Give all that this worker has."""
        return [*self._held.values()]

    def present(self) -> list[nn.Parameter]:
        """List the parameters that have state."""
        each = zip(self._parameters, self.known, strict=True)
        return [parameter for (parameter, _), has in each if has]

    def forget(self) -> None:
        """Have nothing."""
        self._held.clear()

    def hold(self, pieces: Sequence[Piece], kept: Region) -> None:
        """Have the state of these pieces alone; take what is not here from where all of it is."""
        self._held = {
            piece: self._held.get(piece) or self._taken(piece, kept)
            for piece in pieces
            if self.known[piece.index]
        }

    def _taken(self, piece: Piece, kept: Region) -> dict[str, Any]:
        parameter, group = self._parameters[piece.index]
        keys = self.keys[piece.index].items()
        state: dict[str, Any] = {name: place_of(kept, piece, key).clone() for name, key in keys}
        move_one(state, group, parameter.device)
        return state

    def leave(self, known: memoryview) -> None:
        """Have nothing, as a loop has ended in which these parameters have got state."""
        for state in self._held.values():
            state.clear()  # whoever updates has it, too
        self._held.clear()
        self.known = memoryview(bytes(known))

    def make_whole(self, optimizer: torch.optim.Optimizer, kept: Region) -> None:
        """Give an optimizer the whole state of its parameters, from where all of it is."""
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for index, (parameter, group) in enumerate(self._parameters):
            if self.known[index] and id(parameter) in own:
                keys = self.keys[index].items()
                state[parameter] = {name: kept.tensor(key.at).clone() for name, key in keys}
                move_one(state[parameter], group, parameter.device)
        optimizer.state = state

    def write(self, into: Region) -> None:
        """Copy all that this worker has to where all of it is."""
        for piece, state in self._held.items():
            for name, key in self.keys[piece.index].items():
                if key.is_array or piece.is_first:
                    place = place_of(into, piece, key)
                    place.copy_(state[name].detach().reshape(place.shape))

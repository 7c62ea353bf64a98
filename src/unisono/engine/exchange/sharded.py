"""Replicas whose workers each keep the optimizer state of their pieces alone (ZeRO-1).

As ``staged.py``, but what is given to all are parameters, behind the update::

    worker 0   parts ──►┌────────┐──► its pieces of all parts, added, updated ──►┌────────┐
                        │ host's │        and of the state, nowhere else         │ host's │──► all
    worker 1   parts ──►│ memory │──► its pieces of all parts, added, updated ──►│ memory │
                        └────────┘                                               └────────┘
                    gather: all meet                                         share: all meet

Sums lie where parts were, so they take no room, unless something asks for all of them (a norm,
``on_gradients``). Whoever is lost takes its pieces of the state with it, at any time, and all go
back to the newest snapshot, where each worker writes its pieces. When somebody joins, the pieces
are divided anew from there, too.

On several hosts the state is divided among the workers of each host: lane i adds up with the other
hosts and updates, with the same bits on every host, so parameters cross no network.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.arena import Arena, Block, Region, private_bytes, within
from unisono.engine.exchange.hosts_exchange import StagedHostsExchange
from unisono.engine.exchange.parts import OrderedSum
from unisono.engine.exchange.protocol import Exchange
from unisono.engine.exchange.shared_optimizer_state import (
    PiecesOfState,
    StateKey,
    StateKeys,
    lay_down,
    place_of,
    plan_state,
)
from unisono.engine.exchange.staged import StagedExchange
from unisono.engine.state.optimizer_state import StateInPieces, check_in_place, move_one
from unisono.engine.state.optimizers import members_of
from unisono.plan.shards import Piece
from unisono.runtime.device import in_memory_order
from unisono.runtime.timeouts import STALL
from unisono.runtime.workers.launcher_messages import Live
from unisono.runtime.workers.memory import ALIGNMENT_BYTES

_POLL_S = 0.001


class ShardedStagedExchange(StagedExchange):
    """An exchange of replicas whose state is in pieces; the optimizer is element-wise."""

    is_in_pieces = True
    optimizer_state: OwnPieces
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

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`; meets nobody."""
        self._fetch()
        return self._sum.add()

    def all_sums(self, purpose: str) -> bool:
        """See :class:`Exchange`."""
        self._view_whole(self._all_sums())
        for place, total in zip(self._sums_of_pieces, self.totals, strict=True):
            self.copies.to_host(place, total)
        self.copies.wait()
        if not self._team.meet(purpose):
            return False
        for there, here in self._sums_within(0, self._num_bytes):
            self.copies.to_device(here, there)
        return True

    def are_read(self, purpose: str) -> bool:
        """See :class:`Exchange`; what was changed in all sums is in this worker's."""
        for total, there in zip(self.totals, self._sums.pieces(self.pieces), strict=True):
            total.copy_(there)
        self.copies.wait()
        return self._team.meet(purpose)

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """See :class:`Exchange`."""
        return Exchange.agree(self, value, purpose)

    def share(self, purpose: str) -> bool:
        """See :class:`Exchange`; hands the parameters round."""
        there, here, (start, stop) = self._parameters_there, self._parameters_memory, self._mine
        for place, source in self._within(there, here, start, stop):
            self.copies.to_host(place, source)
        self.copies.wait()
        if not self._team.meet(purpose):
            return False
        for first, last in ((0, start), (stop, self._num_bytes)):
            for source, place in self._within(there, here, first, last):
                self.copies.to_device(place, source)
        return True

    def load(self) -> None:
        """See :class:`Exchange`; nobody writes what others may still read of the lost step."""
        while len(self._team.hosts) == 1 and not self._team.meet("going back"):
            continue
        super().load()

    def take_changes(self, *, alone: bool = False) -> None:
        """See :class:`Exchange`; raises RuntimeError where the optimizer's state was replaced."""
        super().take_changes(alone=alone)
        check_in_place(self._optimizer, self._shown)

    def hand_out(self) -> None:
        """See :class:`Exchange`."""
        if not self.device.is_host:  # the whole state takes the place of parts, which are read
            for block in (*self._own.blocks, *self._fetched):
                block.release()
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
        arena, members = self.memory.arena, members_of(self._optimizer)
        self.optimizer_state = pieces = OwnPieces(arena, keys, self._optimizer, self.parameters)
        self._shown: dict[str, Any] = {
            name: StateInPieces(member, pieces) for name, member in members.items()
        }
        super()._bind(keys, live)
        # Now: all are here, so nobody waits any more for those who left the loop before.
        arena.left[self._team.neighbours.index(self._team.world.rank)] = 0
        self._parameters_there = arena.parameters.everything()
        self._pin(self._parameters_there)
        self._parameters_memory = private_bytes(self._num_bytes, self.device, self._divided)
        places = Region(self._parameters_memory, 0, arena.plan.parameters).tensors()
        for place, parameter in zip(places, self.parameters, strict=True):
            if parameter.numel():
                parameter.data = place.copy_(parameter.detach())
        for name, member in members.items():
            member.state = self._shown[name]

    def _plan_sum(self) -> None:
        self._take_pieces(self._cut(self._team.size)[self._team.position])
        self._sum = OrderedSum(self._published(), self.pieces)
        self.totals = self._sum.totals
        self._hold_state()

    def _take_pieces(self, pieces: Sequence[Piece]) -> None:
        sums, slots = self.memory.arena.sums, self.memory.arena.plan.parameters
        self.pieces, self._sums_of_pieces = pieces, sums.pieces(pieces)
        places = [slots[p.index].offset + slots[p.index].dtype.itemsize * p.start for p in pieces]
        sizes = [total.nbytes for total in self._sums_of_pieces]
        self._mine = (places[0], places[-1] + sizes[-1]) if pieces else (0, 0)
        # Some bytes even if they have no elements, as these must be on their device, too.
        start = max(0, min(self._mine[0], self._num_bytes - ALIGNMENT_BYTES))
        self._slice = start, max(self._mine[1], start + ALIGNMENT_BYTES)

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


class ShardedStagedHostsExchange(ShardedStagedExchange, StagedHostsExchange):
    """An exchange between hosts. Final."""

    _here: Block | None  # where the sums of this worker's pieces are on its device

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`."""
        present = self._all_reduce.finish()
        if self._here is not None:
            for source, place in self._within(self._sums_there, self._here, *self._mine):
                self.copies.to_device(place, source)
        return present

    def _plan_sum(self) -> None:
        arena, all_reduce = self.memory.arena, self._all_reduce
        lanes = self._cut(all_reduce.num_lanes)
        all_reduce.plan(self.division, lanes, (arena.memory, arena.sums.start))
        self._take_pieces([] if all_reduce.number is None else lanes[all_reduce.number])
        self.totals, self._here = self._sums_of_pieces, None
        if not self.device.is_host:
            self._pin(self._sums_there)
            self._here = Block([*within(self._spans, *self._slice)])
            self.totals = Region(self._here, 0, arena.plan.parameters).pieces(self.pieces)
        self._hold_state()


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
    """This worker's pieces of an optimizer's state, where its parameters are. Final."""

    def __init__(
        self,
        arena: Arena,
        keys: StateKeys,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.keys, self.known = keys, arena.whose
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._parameters = [(parameter, groups[id(parameter)]) for parameter in parameters]
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

    def show(self, optimizer: Optimizer, parameter: torch.Tensor, index: int) -> None:
        """See :class:`PiecesOfState`; no worker can."""

    def here(self) -> list[dict[str, Any]]:
        """Return all that this worker has."""
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

        def taken(piece: Piece) -> dict[str, Any]:
            return self._moved(piece.index, lambda key: place_of(kept, piece, key))

        self._held = {
            piece: self._held.get(piece) or taken(piece)
            for piece in pieces
            if self.known[piece.index]
        }

    def leave(self, known: memoryview) -> None:
        """Have nothing, as a loop has ended in which these parameters have got state."""
        for state in self._held.values():
            state.clear()  # whoever updates has it, too
        self._held.clear()
        self.known = memoryview(bytes(known))

    def make_whole(self, optimizer: Optimizer, kept: Region) -> None:
        """Give an optimizer the whole state of its parameters, from where all of it is."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        optimizer.state = defaultdict(dict)
        for index, (parameter, _) in enumerate(self._parameters):
            if self.known[index] and id(parameter) in own:
                state = self._moved(index, lambda key: kept.tensor(key.at))
                optimizer.state[parameter] = state

    def write(self, into: Region) -> None:
        """Copy all that this worker has to where all of it is."""
        for piece, state in self._held.items():
            for name, key in self.keys[piece.index].items():
                if key.is_array or piece.is_first:
                    place = place_of(into, piece, key)
                    place.copy_(state[name].detach().reshape(place.shape))

    def _moved(self, index: int, find: Callable[[StateKey], torch.Tensor]) -> dict[str, Any]:
        """Copy a parameter's state, or a piece of it, to where its optimizer has it."""
        parameter, group = self._parameters[index]
        state: dict[str, Any] = {name: find(key).clone() for name, key in self.keys[index].items()}
        move_one(state, group, parameter.device)
        return state

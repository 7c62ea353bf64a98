"""Every worker has the parameters, and the optimizer state of its pieces alone (ZeRO-1).

Parameters are distributed to all workers after the update::

    worker 0   parts ──►┌────────┐──► its pieces of all parts, added, updated ──►┌────────┐
                        │ host's │        and of the state, nowhere else         │ host's │──► all
    worker 1   parts ──►│ memory │──► its pieces of all parts, added, updated ──►│ memory │
                        └────────┘                                               └────────┘
                    gather: barrier                                          share: barrier

Sums overwrite parts and take no memory, unless all sums are needed (for a norm, ``on_gradients``).
If a worker is lost, its pieces of the state are lost with it, and all workers return to the newest
snapshot, to which each has written its pieces. When a worker joins, the state is divided again from
that snapshot.

On several hosts the state is divided among the workers of each host: lane i adds up with the other
hosts and updates, with the same bits on every host, so parameters cross no network.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from unisono.engine.exchange.arena import Region
from unisono.engine.exchange.host_memory import HostMemoryCarriage
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.ownership import Ownership, PlannedState
from unisono.engine.exchange.replicas import (
    begin_alike,
    copy_replica,
    hashes_of,
    lay_out_alike,
    load_replica,
    roll_back_replica,
)
from unisono.engine.exchange.shared_optimizer_state import (
    PiecesOfState,
    StateKey,
    StateKeys,
    lay_down,
    place_of,
    plan_state,
)
from unisono.engine.state.optimizer_state import StateInPieces, check_in_place, move_one
from unisono.engine.state.optimizers import optimizers_of
from unisono.plan.shards import Piece
from unisono.runtime.device import in_memory_order
from unisono.runtime.timeouts import STALL
from unisono.runtime.workers.launcher_messages import Live

_POLL_S = 0.001


@final
class OwnedPieces(Ownership):
    """Each worker owns the state of its pieces; the optimizer is element-wise."""

    is_in_pieces = True
    optimizer_state: OwnPieces
    carriage: HostMemoryCarriage
    _owners: frozenset[int] = frozenset()
    _taken_from: int | None = None  # the slot of a snapshot; None: the newest one

    @classmethod
    @override
    def plan_state(cls, optimizer: Optimizer, updated: Mapping[str, nn.Parameter]) -> PlannedState:
        return plan_state(optimizer, updated)

    @property
    @override
    def is_lost(self) -> bool:
        return not self._owners <= {*self.team.membership.ranks}

    @override
    def trust(self) -> None:
        self._owners = frozenset(self.team.membership.ranks)

    @override
    def bind(self, keys: StateKeys, live: Live | None) -> None:
        layout, arena = self.layout, self.memory.arena
        optimizers = optimizers_of(layout.optimizer)
        self.optimizer_state = pieces = OwnPieces(arena.whose, keys, layout)
        self._shown: dict[str, Any] = {
            name: StateInPieces(single, pieces) for name, single in optimizers.items()
        }
        lay_out_alike(layout)
        if live is None:
            begin_alike(self, self._write_state, self._read_state)
        else:
            roll_back_replica(self, self._read_state)
        # Now all are here, so no worker still waits for those that left the previous loop.
        arena.left[layout.share[0]] = 0
        self._host_parameters = arena.parameters.everything()
        layout.pin(self._host_parameters)
        self._parameters_memory = layout.allocate()
        places = Region(self._parameters_memory, 0, arena.plan.parameters).tensors()
        for place, parameter in zip(places, layout.parameters, strict=True):
            if parameter.numel():
                parameter.data = place.copy_(parameter.detach())
        for name, single in optimizers.items():
            single.state = self._shown[name]

    @override
    def load(self) -> None:
        # No worker writes what others may still read of the lost step.
        while not self.team.meet("going back"):
            continue
        roll_back_replica(self, self._read_state)

    @override
    def discard_changes(self) -> None:
        load_replica(self.layout)  # programs cannot change state in pieces

    @override
    def copy(self, slot: int, copy_of_buffers: int, position: int, size: int) -> None:
        copy_replica(self.layout, slot, copy_of_buffers, position, size, into_slot=True)
        states, whose = self.memory.snapshots.states(slot)
        self.optimizer_state.write(states)
        whose[:] = self.optimizer_state.known

    @override
    def plan(self) -> None:
        """Prepare for the current division: load the state of this worker's pieces."""
        self.carriage.plan(everywhere=False)
        snapshots = self.memory.snapshots
        slot = snapshots.newest if self._taken_from is None else self._taken_from
        self._taken_from = None
        if slot is not None:
            self.optimizer_state.reassign(self.carriage.pieces, snapshots.states(slot)[0])
        if not self.is_lost:
            self.trust()

    @override
    def all_sums(self, purpose: str) -> bool:
        return self.carriage.spread_sums(purpose)

    @override
    def are_read(self, purpose: str) -> bool:
        self.carriage.take_changed_sums()
        return self.team.meet(purpose)

    @override
    def share(self, purpose: str) -> bool:
        return self.carriage.spread(self._host_parameters, self._parameters_memory, purpose)

    @override
    def publish_changes(self, *, alone: bool) -> None:
        """Raise RuntimeError if the program replaced the optimizer's state."""
        check_in_place(self.layout.optimizer, self._shown)

    @override
    def hashes(self) -> dict[str, int]:
        return hashes_of(self.layout)

    @override
    def hand_out(self) -> None:
        if not self.layout.device.is_host:  # the whole state needs the memory of the parts
            self.carriage.release_parts()
        states, whose = self.memory.snapshots.states(self.memory.newest_slot)
        self.optimizer_state.leave(whose)
        for name, single in optimizers_of(self.layout.optimizer).items():
            if single.state is self._shown[name]:
                self.optimizer_state.make_whole(single, states)

    @override
    def leave(self) -> None:
        """Store this worker's pieces in shared memory.

        If the state was not handed out (the loop was left early, or there are no snapshots), the
        first access makes it whole, once all workers of this host have left.
        """
        arena, pieces = self.memory.arena, self.optimizer_state
        position, num_here = self.layout.share
        if not self.is_lost:
            pieces.write(arena.states)
            arena.left[position] = 1
        pieces.leave(pieces.known)
        # No reference to this exchange: a cycle would keep a device's memory until Python's
        # garbage collection.
        bring = functools.partial(_bring, pieces, arena.states, arena.left[:num_here])
        for shown in self._shown.values():
            shown.bring = bring
        for parameter in self.layout.parameters:
            parameter.data = parameter.data.clone()

    def _write_state(self, slot: int) -> None:
        states, whose = self.memory.snapshots.states(slot)
        layout, keys = self.layout, self.optimizer_state.keys
        whose[:] = lay_down(layout.optimizer.state, layout.parameters, keys, states)
        self._read_state(slot)
        self.describe(slot, {}, {})

    def _read_state(self, slot: int) -> None:
        self.optimizer_state.known[:] = self.memory.snapshots.states(slot)[1]
        self.optimizer_state.forget()
        self._taken_from = slot


def _bring(pieces: OwnPieces, states: Region, left: memoryview, optimizer: Optimizer) -> None:
    """Wait for the pieces of all workers, and make the state of an optimizer whole."""
    until_s = time.monotonic() + STALL.in_s()
    while not all(left):
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"`optimizer.state` is whole once every worker has left its loop, but after "
                f"{STALL.in_s():.0f} s only {sum(left)} of {len(left)} have: leave the "
                f"loop on every worker, or start the program again, which resumes."
            )
        time.sleep(_POLL_S)
    pieces.make_whole(optimizer, states)


@final
class OwnPieces(PiecesOfState):
    """This worker's pieces of an optimizer's state, on the devices of its parameters."""

    def __init__(self, known: memoryview, keys: StateKeys, layout: LoopLayout) -> None:
        self.keys, self.known = keys, known
        groups = {id(p): group for group in layout.optimizer.param_groups for p in group["params"]}
        self._parameters = [(parameter, groups[id(parameter)]) for parameter in layout.parameters]
        self._held: dict[Piece, dict[str, Any]] = {}

    @override
    def parameter(self, piece: Piece) -> torch.Tensor:
        return in_memory_order(self._parameters[piece.index][0])[piece.start : piece.stop]

    @override
    def of_piece(self, piece: Piece) -> dict[str, Any]:
        return self._held[piece]

    @override
    def adopt(self, piece: Piece, state: dict[str, Any]) -> None:
        self._held[piece] = state
        if piece.is_first:
            self.known[piece.index] = 1

    @override
    def show(self, optimizer: Optimizer, parameter: torch.Tensor, index: int) -> None:
        return

    def here(self) -> list[dict[str, Any]]:
        """Return all state that this worker has."""
        return [*self._held.values()]

    def present(self) -> list[nn.Parameter]:
        """Return the parameters that have state."""
        each = zip(self._parameters, self.known, strict=True)
        return [parameter for (parameter, _), has in each if has]

    def forget(self) -> None:
        """Discard all state."""
        self._held.clear()

    def reassign(self, pieces: Sequence[Piece], kept: Region) -> None:
        """Keep only the state of these pieces; copy missing state from the whole state `kept`."""

        def taken(piece: Piece) -> dict[str, Any]:
            return self._moved(piece.index, lambda key: place_of(kept, piece, key))

        self._held = {
            piece: self._held.get(piece) or taken(piece)
            for piece in pieces
            if self.known[piece.index]
        }

    def leave(self, known: memoryview) -> None:
        """Discard all state at the end of a loop; `known` marks the parameters that have some."""
        for state in self._held.values():
            state.clear()  # the update also refers to it
        self._held.clear()
        self.known = memoryview(bytes(known))

    def make_whole(self, optimizer: Optimizer, kept: Region) -> None:
        """Set an optimizer's whole state for its parameters, from the whole state `kept`."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        optimizer.state = defaultdict(dict)
        for index, (parameter, _) in enumerate(self._parameters):
            if self.known[index] and id(parameter) in own:
                state = self._moved(index, lambda key: kept.tensor(key.at))
                optimizer.state[parameter] = state

    def write(self, into: Region) -> None:
        """Copy all state of this worker into the whole state."""
        for piece, state in self._held.items():
            for name, key in self.keys[piece.index].items():
                if key.is_array or piece.is_first:
                    place = place_of(into, piece, key)
                    place.copy_(state[name].detach().reshape(place.shape))

    def _moved(self, index: int, find: Callable[[StateKey], torch.Tensor]) -> dict[str, Any]:
        """Copy the state of a parameter, or of a piece, to the device where it is used."""
        parameter, group = self._parameters[index]
        state: dict[str, Any] = {name: find(key).clone() for name, key in self.keys[index].items()}
        move_one(state, group, parameter.device)
        return state

"""Every worker has a replica of parameters and optimizer state, and updates all of it.

All make the same update from the same sums, so replicas stay equal, bit for bit. No replica is ever
torn: once the sums are complete, losing a worker loses no data, and the others continue without
going back. A worker that joins takes its replica from the newest snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import final

import torch
from typing_extensions import override

from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.ownership import Ownership
from unisono.engine.exchange.shared_optimizer_state import StateKeys
from unisono.engine.exchange.snapshots import hash_of
from unisono.engine.state.optimizer_state import apply_state, take_state
from unisono.engine.state.optimizers import is_elementwise
from unisono.errors import CheckpointError
from unisono.plan.shards import cut
from unisono.runtime.device import in_memory_order
from unisono.runtime.workers.launcher_messages import Live


@final
class Replicas(Ownership):
    """Every worker has all parameters and all state."""

    @override
    def bind(self, keys: StateKeys, live: Live | None) -> None:
        lay_out_alike(self.layout)
        if live is None:
            begin_alike(self, self._write_state, self._read_state)
        else:
            self.load()

    @override
    def load(self) -> None:
        roll_back_replica(self, self._read_state)

    @override
    def discard_changes(self) -> None:
        self._read_state(load_replica(self.layout))

    @override
    def copy(self, slot: int, copy_of_buffers: int, position: int, size: int) -> None:
        copy_replica(self.layout, slot, copy_of_buffers, position, size, into_slot=True)

    @override
    def plan(self) -> None:
        self.carriage.plan(everywhere=True)

    @override
    def all_sums(self, purpose: str) -> bool:
        return True  # they are all here

    @override
    def are_read(self, purpose: str) -> bool:
        return True  # by no other worker

    @override
    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        return [value]  # that of every worker

    @override
    def share(self, purpose: str) -> bool:
        # Parts of the next step may be published once all workers have read these.
        self.carriage.await_readers(purpose)
        return True

    @override
    def leave(self) -> None:
        """Keep parameters and state where they are, in separate memory."""

    @override
    def hashes(self) -> dict[str, int]:
        tensors: dict[str, torch.Tensor] = {}
        with suppress(CheckpointError):  # state that cannot be named
            tensors, _ = take_state(self.layout.optimizer, self.named_whole())
        return hashes_of(self.layout) | {name: hash_of(one) for name, one in tensors.items()}

    def _write_state(self, slot: int) -> None:
        tensors, numbers = take_state(self.layout.optimizer, self.named_whole())
        self.describe(slot, {"numbers": numbers}, tensors)

    def _read_state(self, slot: int) -> None:
        snapshots, optimizer = self.memory.snapshots, self.layout.optimizer
        facts, tensors = snapshots.facts(slot), snapshots.extra(slot)
        optimizer.state.clear()
        apply_state(optimizer, self.named_whole(), facts, tensors)


def lay_out_alike(layout: LoopLayout) -> None:
    """Lay out parameters and their optimizer state identically on every worker.

    Fused kernels pair elements by their places in memory, and state may be older than the layout:
    Adagrad makes its own before a program lays the model out with its channels last. State of an
    optimizer that looks at whole parameters stays as that has laid it out.
    """
    for parameter in layout.all:
        parameter.data = parameter.data.clone()
    if not is_elementwise(layout.optimizer):
        return
    for parameter in layout.parameters:
        state = layout.optimizer.state.get(parameter, {})
        for name, value in state.items():
            is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                laid_out = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                state[name] = laid_out.copy_(value)


def begin_alike(
    owner: Ownership, give_state: Callable[[int], None], take_state: Callable[[int], None]
) -> None:
    """Begin a loop with the leader's values on every worker, through an unnumbered snapshot.

    Args:
        give_state: writes the leader's optimizer state into a slot.
        take_state: reads it.
    """
    team, layout, snapshots = owner.team, owner.layout, owner.memory.snapshots
    while True:
        leader, slot = team.membership.leader, snapshots.begin()
        if team.is_leader:
            layout.buffers.give()
            copy_replica(layout, slot, 0, 0, 1, into_slot=True)
            give_state(slot)
        team.meet("sharing parameters")
        if team.membership.leader == leader:
            break

    def written() -> list[memoryview]:
        said = team.broadcast_from_leader(
            lambda: b"%d" % snapshots.written(slot), "size of the state"
        )
        return [snapshots.view(slot, int(said))]

    owner.between.share(written)
    if not team.is_leader:
        copy_replica(layout, slot, 0, 0, 1, into_slot=False)
        take_state(slot)
    layout.buffers.load(0)
    team.meet("shared parameters")


def roll_back_replica(owner: Ownership, take_state: Callable[[int], None]) -> None:
    """Load the replica in the newest snapshot; `take_state` reads the optimizer's state."""
    owner.carriage.forget_step()
    take_state(load_replica(owner.layout))


def load_replica(layout: LoopLayout) -> int:
    """Load parameters and buffers from the newest snapshot, and return its slot."""
    slot, copy_of_buffers = layout.memory.newest_slot, layout.memory.copy_of_buffers
    copy_replica(layout, slot, copy_of_buffers, 0, 1, into_slot=False)
    layout.buffers.load(copy_of_buffers)
    return slot


def copy_replica(
    layout: LoopLayout,
    slot: int,
    copy_of_buffers: int,
    position: int,
    size: int,
    *,
    into_slot: bool,
) -> None:
    """Copy a share of parameters and buffers to or from a snapshot; see :meth:`Snapshots.copy`."""
    snapshots = layout.memory.snapshots
    snapshots.copy(slot, copy_of_buffers, position, size, into_slot=into_slot, buffers_alone=True)
    kept = snapshots.parameters(slot)
    pieces = cut([parameter.numel() for parameter in layout.all], size)[position]
    with torch.no_grad():
        for piece in pieces:
            elements = slice(piece.start, piece.stop)
            here = in_memory_order(layout.all[piece.index])[elements]
            there = in_memory_order(kept[piece.index])[elements]
            there.copy_(here) if into_slot else here.copy_(there)


def hashes_of(layout: LoopLayout) -> dict[str, int]:
    """Return a hash of each parameter, by name."""
    return {name: hash_of(one) for name, one in zip(layout.names, layout.all, strict=True)}

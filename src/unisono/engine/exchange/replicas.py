"""Workers that each have a replica and update all of it: what such exchanges have in common.

Every worker makes the same update from the same sums, so replicas stay the same, bit for bit. No
replica is ever torn: once the sums are there, whoever is lost takes nothing with it, and the others
go on without going back. Whoever joins takes its replica from the newest snapshot.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from contextlib import suppress

import torch

from unisono.engine.exchange.private_view import check_alike
from unisono.engine.exchange.protocol import Exchange
from unisono.engine.exchange.shared_optimizer_state import StateKeys
from unisono.engine.exchange.snapshots import as_bytes
from unisono.engine.state.optimizer_state import apply_state, take_state
from unisono.engine.state.optimizers import is_elementwise
from unisono.errors import CheckpointError
from unisono.plan.shards import Piece, cut
from unisono.runtime.device import in_memory_order
from unisono.runtime.workers.launcher_messages import Live


class ReplicaExchange(Exchange):
    """An exchange of replicas; arguments as of :class:`Exchange`. Abstract: it knows no sums."""

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

    def replica(self) -> int:
        """See :class:`Exchange`."""
        return 0 if self._team.size == 1 else zlib.crc32(repr(self._hashes()).encode()) or 1

    def check_replicas(self, seen: Collection[int]) -> None:
        """See :class:`Exchange`."""
        if len(seen) > 1:
            check_alike(self._team, self._hashes())

    def _hashes(self) -> dict[str, int]:
        tensors: dict[str, torch.Tensor] = {}
        with suppress(CheckpointError):  # state that cannot be named
            tensors, _ = take_state(self._optimizer, self._named_whole())
        each = (*zip(self._names, self._all, strict=True), *tensors.items())
        return {name: zlib.crc32(as_bytes(tensor.detach())) for name, tensor in each}

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        for parameter in self._all:
            # Laid out as everybody's are, whatever the program has made of it.
            parameter.data = parameter.data.clone()
        self._lay_out_state()
        self.pieces = [Piece(n, 0, p.numel()) for n, p in enumerate(self.parameters)]
        if live is None:
            self._begin()
        else:
            self._load()

    def _lay_out_state(self) -> None:
        """Lay the optimizer's state out as its parameters are.

        Fused kernels pair elements by their places in memory, and state may be older than the
        layout: Adagrad makes its own before a program lays the model out with its channels last.
        State of an optimizer that looks at whole parameters stays as that has laid it out.
        """
        if not is_elementwise(self._optimizer):
            return
        for parameter in self.parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if is_like and value.stride() != parameter.stride():
                    laid_out = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                    state[name] = laid_out.copy_(value)

    def _begin(self) -> None:
        """Have everybody take the leader's values, by way of a snapshot that is none yet."""
        team, memory = self._team, self.memory
        while True:
            leader, slot = team.membership.leader, memory.snapshots.begin()
            if team.is_leader:
                self.buffers.give()
                self._copy(slot, 0, 0, 1, into_slot=True)
                self._give_state(slot)
            team.meet("sharing parameters")
            if team.membership.leader == leader:
                break
        self._bring_to_hosts(slot)
        if not team.is_leader:
            self._copy(slot, 0, 0, 1, into_slot=False)
            self._take_state(slot)
        self.buffers.load(0)
        team.meet("shared parameters")

    def _bring_to_hosts(self, slot: int) -> None:
        """Bring a snapshot to other hosts; here there are none."""

    def _load(self) -> None:
        memory = self.memory
        slot, copy_of_buffers = memory.newest_slot, memory.copy_of_buffers
        self._copy(slot, copy_of_buffers, 0, 1, into_slot=False)
        self.buffers.load(copy_of_buffers)
        self._take_state(slot)

    def _give_state(self, slot: int) -> None:
        tensors, numbers = take_state(self._optimizer, self._named_whole())
        self._describe(slot, {"numbers": numbers}, tensors)

    def _take_state(self, slot: int) -> None:
        snapshots = self.memory.snapshots
        facts, tensors = snapshots.facts(slot), snapshots.extra(slot)
        self._optimizer.state.clear()
        apply_state(self._optimizer, self._named_whole(), facts, tensors)

    def _copy(
        self, slot: int, copy_of_buffers: int, position: int, size: int, *, into_slot: bool
    ) -> None:
        snapshots = self.memory.snapshots
        snapshots.copy(
            slot, copy_of_buffers, position, size, into_slot=into_slot, buffers_alone=True
        )
        kept = snapshots.parameters(slot)
        pieces = cut([parameter.numel() for parameter in self._all], size)[position]
        with torch.no_grad():
            for piece in pieces:
                elements = slice(piece.start, piece.stop)
                here = in_memory_order(self._all[piece.index])[elements]
                there = in_memory_order(kept[piece.index])[elements]
                there.copy_(here) if into_slot else here.copy_(there)

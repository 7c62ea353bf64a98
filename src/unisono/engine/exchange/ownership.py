"""Who updates what, and whose loss also loses optimizer state."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.between import Between
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.private_view import check_alike
from unisono.engine.exchange.shared_optimizer_state import PiecesOfState, StateKeys
from unisono.engine.state.contents import named_parameters
from unisono.runtime.device import on_host
from unisono.runtime.workers.launcher_messages import Live

PlannedState = tuple[StateKeys, dict[str, torch.Tensor]]
"""Optimizer state in memory that all workers of a host share: its keys, and examples by name."""


class Ownership(ABC):
    """Keeps the parameters and the optimizer's state of one loop, and decides who updates them.

    Methods with a body are the defaults for an ownership that has nothing to do there.

    Attributes:
        optimizer_state: in pieces; None if workers that update have all of it in their optimizers.
        is_in_pieces: whether no other worker has the state of this worker's pieces.
        have_all: whether every worker has the whole state; else one worker of each host has it and
            updates for the others.
        is_state_new: whether the program has changed `optimizer_state`.
        is_written_in_passes: whether passes wrote to parameters without changing their values.
    """

    optimizer_state: PiecesOfState | None = None
    is_in_pieces = False
    have_all = True
    is_state_new = False
    is_written_in_passes = False

    def __init__(self, layout: LoopLayout, carriage: Carriage, between: Between) -> None:
        self.layout, self.carriage, self.between = layout, carriage, between
        self.team, self.memory = layout.team, layout.memory

    @classmethod
    def plan_state(cls, optimizer: Optimizer, updated: Mapping[str, nn.Parameter]) -> PlannedState:
        """Return the optimizer state to keep in shared memory; by default there is none."""
        return [{} for _ in updated], {}

    @abstractmethod
    def bind(self, keys: StateKeys, live: Live | None) -> None:
        """Begin the loop with the others, or join it, so that all workers have the same state."""

    @abstractmethod
    def load(self) -> None:
        """Load the newest snapshot. Collective."""

    @abstractmethod
    def discard_changes(self) -> None:
        """Undo what the program has changed since :meth:`load`. Not collective."""

    @abstractmethod
    def copy(self, slot: int, copy_of_buffers: int, position: int, size: int) -> None:
        """Copy one of `size` shares of the state into a snapshot."""

    @abstractmethod
    def plan(self) -> None:
        """Prepare for the current division of the work."""

    @abstractmethod
    def all_sums(self, purpose: str) -> bool:
        """Gather all sums in the carriage's `whole`; return False if a worker was lost."""

    @abstractmethod
    def are_read(self, purpose: str) -> bool:
        """Wait until every worker has read `whole`; return False if one was lost."""

    @abstractmethod
    def share(self, purpose: str) -> bool:
        """Publish the update to all workers; return False if one was lost during it."""

    @abstractmethod
    def leave(self) -> None:
        """Move the model and its optimizer into separate memory. Not collective."""

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """Return the values of all workers with separate sums; None if a worker was lost."""
        membership = self.team.membership
        heard = self.team.gather(value, purpose)
        return list(heard.values()) if self.team.membership == membership else None

    @property
    def is_lost(self) -> bool:
        """Whether state that one worker alone had was lost with it."""
        return False

    def trust(self) -> None:
        """Treat the state of the current members as the run's."""
        return

    def publish_changes(self, *, alone: bool) -> None:
        """Publish changes that the program made between two steps."""
        return

    def publish_before_save(self, *, alone: bool) -> None:
        """Publish changes that the program made since the step, before a snapshot."""
        return

    def changed_name(self) -> str:
        """Return the name of a parameter changed since :meth:`publish_changes`; empty: none."""
        return ""

    def updating(self) -> AbstractContextManager[None]:
        """Allow an optimizer to update whole parameters inside the block."""
        return nullcontext()

    def load_fixed(self) -> None:
        """Load changes of fixed parameters by a whole update on another worker."""
        return

    def fixed_values(self) -> Sequence[torch.Tensor]:
        """Return the fixed parameters, in host memory that passes do not change."""
        return [on_host(p).clone() for p in self.layout.fixed.values()]

    def fixed_suspects(self) -> Sequence[int]:
        """Return the positions of fixed parameters that may have changed since the loop began."""
        return range(len(self.layout.fixed))

    def hashes(self) -> dict[str, int]:
        """Return the hashes of this worker's replica by name; empty: there is none."""
        return {}

    def replica(self) -> int:
        """Return one hash of this worker's replica, or 0 if none can be compared."""
        hashes = self.hashes() if self.team.size > 1 else {}
        return zlib.crc32(repr(hashes).encode()) or 1 if hashes else 0

    def check_replicas(self, seen: Collection[int]) -> None:
        """Raise MismatchError if the hashes of :meth:`replica` differ between workers."""
        if len(seen) > 1:
            check_alike(self.team, self.hashes())

    def hand_out(self) -> None:
        """Distribute one worker's state to all from the newest snapshot. Not collective."""
        return

    def hand_round(self) -> None:
        """Distribute one worker's state to all without a snapshot. Collective."""
        return

    def named_whole(self) -> dict[str, nn.Parameter]:
        """Return the parameters whose optimizer state is not kept in pieces, by name."""
        if self.optimizer_state is not None:
            return {}
        return named_parameters(self.layout.model, self.layout.optimizer)

    def describe(
        self, slot: int, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Write the metadata that is saved beside the state into a snapshot."""
        facts = {**facts, "copy of buffers": self.layout.buffers.now}
        self.memory.snapshots.describe(slot, facts, tensors)

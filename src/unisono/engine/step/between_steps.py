"""What happens between two steps: changes by the program, snapshots, returns to a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from unisono.engine.exchange.exchange import Exchange
from unisono.engine.step.model_guard import ModelGuard
from unisono.engine.step.records import Records
from unisono.engine.step.shard_passes import ShardPasses
from unisono.engine.step.update import LoopOptimizer, SlicedUpdate
from unisono.runtime.workers.team import Team

_COMPARED, _COMPARED_EVERY = 2, 1024  # steps in which replicas are


@final
class BetweenSteps:
    """The state of one loop while no step changes it.

    If it `compares`, it compares replicas, since all devices compute the same bits. `copied` is the
    snapshot that is whole once the next step's shards are done, or None.
    """

    def __init__(
        self,
        exchange: Exchange,
        team: Team,
        guard: ModelGuard,
        passes: ShardPasses,
        optimizers: Sequence[LoopOptimizer],
        records: Records,
        *,
        compares: bool,
    ) -> None:
        self._exchange, self._team, self._guard = exchange, team, guard
        self._passes, self._optimizers, self._records = passes, optimizers, records
        self.compares = compares
        self._begun_at: int | None = None  # the loop's first step here
        self.copied: int | None = None
        self._follow()

    def divide(self) -> None:
        """Divide the work among the current members."""
        self._exchange.divide()
        self._follow()

    def publish_changes(self, step: int) -> None:
        """Publish changes that the program made since the last update. Collective if any."""
        exchange = self._exchange
        self._guard.check_groups()
        for one in self._optimizers:
            if isinstance(one.update, SlicedUpdate):
                one.update.check_step()
        exchange.publish_changes()
        exchange.buffers.check_changes(self._team)
        self._guard.remember()
        if exchange.division.is_outdated:  # a worker was lost there
            self.divide()
            exchange.pop_new_state()
        elif exchange.pop_new_state():
            self.follow_updates()
        if self.compares:
            self._begun_at = step if self._begun_at is None else self._begun_at
            is_due = step - self._begun_at < _COMPARED or step % _COMPARED_EVERY == 0
            self._records.seen = exchange.replica() if is_due else 0

    def complete(self) -> None:
        """Mark the snapshot as whole, after a barrier of all workers."""
        if self.copied is not None:
            self._exchange.memory.snapshots.complete(self.copied)
            self.copied = None

    def take_snapshot(
        self,
        step: int,
        describe: Callable[[], tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]],
        *,
        wait: bool,
    ) -> int | None:
        """Copy the whole state before `step` into a snapshot, and return its slot. Collective.

        `describe` returns the arguments of :meth:`Exchange.save`, on leaders only. Without `wait`,
        the snapshot is whole after the next step's shards. None: state was lost with a worker.
        """
        while True:
            if not self._exchange.is_lost:
                self._exchange.publish_before_save()
            if self._exchange.is_lost:
                return None
            # Only now: the leader may have been lost there.
            facts, tensors = describe() if self._team.leads_host else ({}, {})
            slot = self._exchange.save(facts, tensors)
            self._team.faults.meet("snapshot", step)
            if not wait:
                self.copied = slot
                return slot
            if self._team.meet("snapshot"):
                self._exchange.memory.snapshots.complete(slot)
                return slot

    def roll_back(self) -> None:
        """Restore the newest snapshot. Collective."""
        self.copied = None
        self._guard.clear_gradients()
        self._exchange.load()
        self._guard.remember()
        self._follow()

    def discard_changes(self) -> None:
        """Undo what the program has changed since :meth:`go_back`. Not collective."""
        self._exchange.discard_changes()
        self._guard.remember()
        self.follow_updates()

    def follow_updates(self) -> None:
        """Prepare to update the pieces that this worker has now."""
        for one in self._optimizers:
            one.follow(self._exchange)

    def _follow(self) -> None:
        self._passes.divide()
        self.follow_updates()

"""What happens between two steps? Snapshots, checkpoints, and a stop for those who join or end.

The leader decides while a step is under way and says so before the meeting that ends it; everybody
reads the same plan and acts on it when the next step begins. A snapshot is due when the time since
the last one is so long that what it costs is a hundredth of it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.errors import CheckpointError
from unisono.state.position import Position
from unisono.state.run_state import RunState
from unisono.step.engine import StepEngine
from unisono.train.checkpoints import Checkpoints
from unisono.train.interrupts import Interrupts
from unisono.workers.barrier import NOTICE_AFTER_S
from unisono.workers.launcher_messages import NoRecovery
from unisono.workers.team import Team

COST_AT_MOST = 0.01
_POLL_S = 0.001


class BoundaryTasks(enum.IntFlag):
    """What is to be done before the next step."""

    NOTHING = 0
    SNAPSHOT = 1
    CHECKPOINT = 2
    STOP = 4


class Boundary:
    """The place between two steps of one loop. Final.

    Args:
        team: the workers.
        engine: has the state.
        kept: what is kept with it.
        identity: the run's.
        checkpoints: where checkpoints go; None: nowhere.
        interrupts: whether this process is to end, where nobody launched it.
        before_snapshot: called before the state is kept.
        before_pause: called before all stand still, which may be the end of the job.
    """

    def __init__(
        self,
        team: Team,
        engine: StepEngine,
        kept: RunState,
        identity: Mapping[str, Any],
        checkpoints: Checkpoints | None,
        interrupts: Interrupts,
        before_snapshot: Callable[[], None],
        before_pause: Callable[[], None],
    ) -> None:
        self._team, self._engine, self._exchange = team, engine, engine.exchange
        self._kept, self._identity = kept, identity
        self._checkpoints = checkpoints
        self._interrupts = interrupts
        self._before_snapshot, self._before_pause = before_snapshot, before_pause
        self._next_at_s = 0.0
        self._has_acted = self._is_checked = False
        self._recovers = team.supervisor.can_replace

    def forgo_recovery(self, reason: str) -> None:
        """Do without snapshots where only recovery would have use for them."""
        self._recovers = False
        self._team.supervisor.tell(NoRecovery(reason))

    def plan(self, after: Position) -> BoundaryTasks:
        """Say, as the leader, what is to be done once the run has come to `after`."""
        if not self._team.is_leader:
            return BoundaryTasks.NOTHING
        plan = BoundaryTasks.NOTHING
        if self._checkpoints is not None and self._checkpoints.is_due(after):
            plan |= BoundaryTasks.SNAPSHOT | BoundaryTasks.CHECKPOINT
        if self._team.is_asked_to_stop:
            plan |= BoundaryTasks.SNAPSHOT | BoundaryTasks.STOP
        if self._interrupts.asked_by is not None:
            plan |= BoundaryTasks.SNAPSHOT | BoundaryTasks.CHECKPOINT | BoundaryTasks.STOP
        if plan:
            self._wait_for_disk()
        elif self._recovers and time.monotonic() >= self._next_at_s:
            plan = BoundaryTasks.NOTHING if self._is_busy else BoundaryTasks.SNAPSHOT
        return plan

    def begin(self) -> bool:
        """Take the first snapshot of a loop, if snapshots are of use. Collective.

        Returns:
            Whether one was taken.

        Raises:
            CheckpointError: there are to be checkpoints, but something cannot be kept.
        """
        try:
            self._kept.check_keepable()
        except CheckpointError as error:
            if self._checkpoints is not None:
                raise
            self.forgo_recovery(str(error))
        if not self._keeps:
            return False
        self._wait_for_disk()
        while self._snapshot(wait=True) is None:
            # Before the first step every worker has the state that the leader had.
            self._exchange.trust_leader()
        return True

    def act(self, plan: BoundaryTasks, step: int) -> None:
        """Do what was planned before `step`. Collective.

        Raises:
            CheckpointError: the optimizer has made state that cannot be kept.
        """
        if self._keeps and not self._is_checked and self._has_acted:
            self._is_checked = True
            self._kept.check_keepable()
        self._has_acted = True
        if not plan & BoundaryTasks.SNAPSHOT:
            return
        is_last = self._interrupts.asked_by is not None
        slot = self._snapshot(wait=bool(plan & (BoundaryTasks.CHECKPOINT | BoundaryTasks.STOP)))
        if slot is None:
            return
        if plan & BoundaryTasks.CHECKPOINT and self._checkpoints is not None:
            self._checkpoints.keep(self._exchange.memory.arena, slot, step, wait=is_last)
        if is_last:
            self._interrupts.end()
        if plan & BoundaryTasks.STOP:
            self._before_pause()
            self._team.pause()

    def end(self, step: int) -> bool:
        """Keep what a loop has led to, `step` steps of the run. Collective.

        Returns:
            False if the leader was lost with what it alone had.
        """
        if not self._keeps:
            self._exchange.hand_round()
            return True
        self._wait_for_disk()
        slot = self._snapshot(wait=True)
        if slot is None:
            return False
        self._exchange.hand_out()
        if self._checkpoints is not None:
            while True:
                self._checkpoints.keep(self._exchange.memory.arena, slot, step, wait=True)
                if self._team.meet("last checkpoint"):
                    break
                # The leader was lost, perhaps before it could ask; the next one does.
        return True

    def leave(self, step: int) -> bool:
        """Keep, without the others, what a loop has led to that is left after `step` steps.

        Nobody changes the shared state any more; the leader copies all of it.

        Returns:
            Whether a replacement may go on from there.
        """
        exchange = self._exchange
        if not self._keeps:
            return True
        if self._team.is_leader:
            self._wait_for_disk()
            slot = exchange.save(*self._collect(was_left=True), alone=True)
            exchange.memory.snapshots.complete(slot)
            if self._checkpoints is not None:
                self._checkpoints.keep(exchange.memory.arena, slot, step, wait=True)
        # Else only the leader has the optimizer's state now, and could be lost with it.
        return exchange.have_all

    @property
    def _keeps(self) -> bool:
        return self._recovers or self._checkpoints is not None

    @property
    def _is_busy(self) -> bool:
        return self._exchange.memory.snapshots.next_is_busy

    def _snapshot(self, *, wait: bool) -> int | None:
        self._before_snapshot()
        start_s = time.monotonic()
        slot = self._engine.take_snapshot(*self._collect(), wait=wait)
        now_s = time.monotonic()
        self._next_at_s = now_s + (now_s - start_s) / COST_AT_MOST
        return slot

    def _collect(self, *, was_left: bool = False) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        with_optimizer = self._exchange.homes is None and self._team.is_leader
        return self._kept.collect(self._identity, with_optimizer=with_optimizer, was_left=was_left)

    def _wait_for_disk(self) -> None:
        """Wait until the checkpoint before is on the disk, which sets the pace then."""
        start_s = time.monotonic()
        is_told = False
        while self._exchange.memory.snapshots.is_writing:
            time.sleep(_POLL_S)
            if not is_told and time.monotonic() - start_s >= NOTICE_AFTER_S:
                is_told = True
                if self._checkpoints is not None:
                    self._checkpoints.tell_slow_disk(NOTICE_AFTER_S)

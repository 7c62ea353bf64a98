"""What happens between two steps? Snapshots, checkpoints, and pauses for workers that join or end.

The leader decides during a step and publishes its plan before the barrier that ends the step; every
worker reads the same plan and acts on it before the next step. A snapshot is due once its cost is a
hundredth of the time since the last one.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, final

import torch

from unisono.engine.state.packing import unpacked_state
from unisono.engine.state.run_state import Position
from unisono.engine.step.engine import StepEngine
from unisono.errors import CheckpointError, WaitTimeoutError
from unisono.plan.samples import SamplePlan
from unisono.programs.kept import KEY
from unisono.runtime.checkpoint.run_directory import ENDED, LEFT
from unisono.runtime.timeouts import MEETING, NOTICE
from unisono.runtime.workers.interrupts import interrupts
from unisono.runtime.workers.launcher_messages import NoRecovery
from unisono.training.first_loss import FIRST_LOSS
from unisono.training.identity import SAMPLES, check_switches, identity
from unisono.training.run_context import RunContext

COST_AT_MOST, COST_AT_MOST_AT_FIRST = 0.01, 0.1
COMPARED_EVERY = 1024  # steps
_POLL_S = 0.001


class BoundaryTasks(enum.IntFlag):
    """What must be done before the next step."""

    NOTHING = 0
    SNAPSHOT = 1
    CHECKPOINT = 2
    STOP = 4
    ADMIT = 8  # replacements, before another loop begins if there is no next step


_LEFT_UNDONE = (
    "the program has left its loop after a step that was undone, as a worker was lost in it, so "
    "all workers start again, from step {}: skip such a step with `if not step.is_done: continue`"
)


@final
class Boundary:
    """The boundary between steps of a loop; `has_ended` once the loop's result is saved."""

    def __init__(self, run: RunContext, engine: StepEngine, plan: SamplePlan) -> None:
        self.engine = engine
        self.is_between_steps = True
        self.has_ended = self.was_left = False
        self.run, self._kept, self._team = run, run.kept, run.team
        self.steps_per_epoch = plan.steps_per_epoch  # of the current epoch
        self._checkpoints = run.checkpoints
        self._exchange, self._memory = engine.exchange, engine.exchange.memory
        self._identity = identity(plan, run.fixed, run.device, is_kept=run.checkpoints is not None)
        if run.checkpoints is not None and run.seen is not None:
            self._identity |= {SAMPLES: run.seen[1], FIRST_LOSS: run.first_loss}
        self.last_means: Mapping[str, float] = {}  # of the last step done here
        self._planned = 0  # tasks as a number: 0 in most steps
        self._next_at_s = 0.0
        self._has_acted = self._is_checked = self._is_undone = False
        self._recovers = run.team.supervisor.can_replace
        self._ends_here = run.team.supervisor.hears_signals

    def forgo_recovery(self, reason: str) -> None:
        """Disable recovery, and with it the snapshots that nothing else needs."""
        self._recovers = False
        self._team.supervisor.notify(NoRecovery(reason))

    def begin(self) -> None:
        """Take a loop's first snapshot, if snapshots are needed. Collective."""
        try:
            self._kept.check_keepable()
        except CheckpointError as error:
            if self._checkpoints is not None:
                raise
            self.forgo_recovery(str(error))
        if not self._keeps:
            return
        # Before the snapshot is whole, so that a launcher that has one knows its loop.
        where = {"directory": None} if self._checkpoints is None else self._checkpoints.facts
        self.run.replicated_calls.note_loop({**asdict(self._memory.snapshots.places), **where})
        self._wait_for_disk()
        while self._snapshot(wait=True) is None:
            # Before the first step every worker has the leader's state.
            self._exchange.trust_leader()
        if self.run.observer.acts_at_begin:  # which is not done again after going back
            self._planned = BoundaryTasks.SNAPSHOT

    def begin_step(self, step: int) -> None:
        """Record that a step has begun."""
        self.is_between_steps = self._is_undone = False
        self._team.note_step(step)

    def abandon_step(self) -> None:
        """Record that a step was left before anything had changed."""
        self.is_between_steps = True

    def plan_next(self) -> None:
        """Publish what must be done after this step; only the leader's plan counts."""
        self._team.plan(self._kept.position.step + 1, self._due_next())

    def count(self, means: Mapping[str, float]) -> None:
        """Count a finished step."""
        position = self._kept.position
        self._team.note_times(position.step, self.engine.timers.times)
        self._advance(position)
        self.last_means = dict(means)
        self._kept.last["means"] = self.last_means
        self._planned = self._team.planned(position.step)
        self.is_between_steps = True

    def act(self) -> bool:
        """Carry out the plan before the next step; False if the run had to go back. Collective."""
        planned, self._planned = self._planned, 0
        if not self._exchange.is_lost:
            self._carry_out(planned)
        if self._exchange.is_lost:
            self.roll_back()
            return False
        return True

    @property
    def admits(self) -> bool:
        """Whether replacements may wait to join, as they do between two steps of one loop."""
        return bool(self._planned & BoundaryTasks.ADMIT)

    def roll_back(self) -> None:
        """Return to the newest snapshot, because a worker was lost during an update."""
        self.engine.between.roll_back()
        self.undo()
        self._planned, self._is_undone = 0, True
        self.is_between_steps, self._has_acted = True, False

    def undo(self) -> None:
        """Restore what an exchange does not, such as what the program changed after a lost step."""
        self._kept.apply_rest(*self._memory.newest())
        if self.run.program_kept is not None and self.run.program_kept.drawn is not None:
            self.engine.passes.draw_on(self.run.program_kept.drawn, self._kept.position.step)

    @property
    def last_done(self) -> tuple[int, int, Mapping[str, float]]:
        """The newest step that counts, its epoch, and its means, or if there is none those here."""
        position = self._kept.position
        epoch = position.epoch - (position.batch == 0)
        return position.step - 1, epoch, self._kept.last.get("means") or self.last_means

    def undo_body(self) -> None:
        """Undo what the rest of the loop's body has changed after a lost step."""
        self.engine.between.discard_changes()
        self.undo()

    def end(self) -> bool:
        """Save the loop's result; return False if it has to go back first. Collective."""
        if self.is_between_steps and not self._exchange.is_lost:
            self.has_ended = self._keep_end()
            if self.has_ended:
                interrupts().honour(self._team)
        return self.has_ended

    def leave(self) -> None:
        """Save the result of a loop that the program leaves early.

        Not collective: this worker cannot know whether the program left by `break` on every worker
        or by an exception on this one alone. One worker of each host does the work: nobody changes
        the shared state any more, and the worker copies all of it that it can see.
        """
        if self._is_undone:
            # Nobody can continue in a loop that the program has left, but replacements can.
            self.run.say_once(_LEFT_UNDONE.format(self._kept.position.step))
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.is_between_steps or self._exchange.is_lost or self._exchange.is_in_pieces:
            return
        if self._keeps and self._team.leads_host:
            self._wait_for_disk()
            self._exchange.publish_before_save(alone=True)
            slot = self._exchange.save(*self._collect(was_left=True), alone=True)
            self._memory.snapshots.complete(slot)
            self._checkpoint(slot, wait=True, end=LEFT + self.run.loop)
        self.was_left = self._keeps
        # Otherwise only the leader has the optimizer's state, and could be lost with it.
        self.has_ended = self._exchange.have_all or not self._keeps

    @property
    def _keeps(self) -> bool:
        return self._recovers or self._checkpoints is not None

    def _advance(self, position: Position) -> None:
        position.step += 1
        position.batch += 1
        if position.batch == self.steps_per_epoch:
            position.epoch, position.batch = position.epoch + 1, 0

    def _due_next(self) -> BoundaryTasks:
        if not self._team.is_leader:
            return BoundaryTasks.NOTHING
        due = BoundaryTasks.NOTHING
        if self._checkpoints is not None:
            after = replace(self._kept.position)
            self._advance(after)
            if self._checkpoints.is_due(after):
                due |= BoundaryTasks.SNAPSHOT | BoundaryTasks.CHECKPOINT
        if self._team.is_stop_requested:
            due |= BoundaryTasks.SNAPSHOT | BoundaryTasks.STOP
            if self._ends_here or len(self._team.hosts) > 1:  # launchers of hosts cannot write
                due |= BoundaryTasks.CHECKPOINT
            elif not self._team.is_ended_by:
                due |= BoundaryTasks.ADMIT
        if due:
            self._wait_for_disk()
        elif self._recovers and time.monotonic() >= self._next_at_s:
            is_busy = self._memory.snapshots.next_is_busy
            due = BoundaryTasks.NOTHING if is_busy else BoundaryTasks.SNAPSHOT
        return due

    def _carry_out(self, planned: int) -> None:
        if self._keeps and not self._is_checked and self._has_acted:
            self._is_checked = True
            self._kept.check_keepable()
        had_acted, self._has_acted = self._has_acted, True
        step = self._kept.position.step
        if not planned:  # any plan includes a snapshot
            # A worker that has just joined or gone back is alone here.
            if had_acted and (step & (step - 1) == 0 or step % COMPARED_EVERY == 0):
                self.compare_program()
            return
        stops = bool(planned & BoundaryTasks.STOP)
        is_last = stops and (self._ends_here or len(self._team.hosts) > 1)
        if self._checkpoints is not None and self._checkpoints.is_on_each_host:
            self._wait_for_disk()  # of this host; the leader has waited for its own
        slot = self._snapshot(wait=bool(planned & (BoundaryTasks.CHECKPOINT | BoundaryTasks.STOP)))
        if slot is None:
            return
        if planned & BoundaryTasks.CHECKPOINT:
            self._checkpoint(slot, wait=is_last)
        if is_last:
            signum = self._team.signal
            # When one worker ends, launchers end the others, even while one of them writes.
            if not self._team.meet("last checkpoint"):
                return
            if self._ends_here:
                interrupts().end(signum)
                return  # the program's own handler lets it continue
            self._team.await_end()
        if stops:
            self.run.observer.before_pause()
            self._team.pause()

    def _keep_end(self) -> bool:
        if not self._keeps:
            if self._team.size == 1 and not self._memory.arena.is_kept_between_loops:
                self._exchange.forget_gradients()
            self._exchange.hand_round()
            return True
        self._wait_for_disk()
        slot = self._snapshot(wait=True)
        if slot is None:
            return False
        # All workers have synchronized and read what they need. The leader writes meanwhile.
        if self._team.world.rank == self._team.neighbours[-1]:
            self._exchange.forget_gradients()
            self._memory.snapshots.keep_only(slot)
        if self._checkpoints is not None:
            self._checkpoint(slot, wait=True, end=ENDED + self.run.loop)
            while not self._team.meet("last checkpoint"):
                # The leader was lost, perhaps before its request; the next one repeats it.
                self._checkpoint(slot, wait=True, end=ENDED + self.run.loop)
        self._exchange.hand_out()
        if not self._exchange.have_all and self.run.program_kept is not None:
            facts, tensors = self._memory.newest()
            self.run.program_kept.hand_out(unpacked_state(facts["state"], tensors)[KEY])
        return True

    def _checkpoint(self, slot: int, *, wait: bool, end: str = "") -> None:
        if self._checkpoints is not None:
            step = self._kept.position.step
            self._checkpoints.keep(self._memory.snapshots, slot, step, wait=wait, end=end)

    def _snapshot(self, *, wait: bool) -> int | None:
        check_switches(self._identity, self.run.device)
        self.run.observer.before_snapshot()
        start_s = time.monotonic()
        self.compare_program()
        if not self._team.leads_host:
            self._kept.modes_now(was_left=False)  # the leader saves them
        step = self._kept.position.step
        slot = self.engine.between.take_snapshot(step, self._collect, wait=wait)
        now_s = time.monotonic()
        # The first snapshot of a loop also waits for workers that arrive later.
        cost_at_most = COST_AT_MOST if self._has_acted else COST_AT_MOST_AT_FIRST
        self._next_at_s = now_s + (now_s - start_s) / cost_at_most
        return slot

    def compare_program(self) -> None:
        """Compare the program's changes between workers. Collective if it runs between steps."""
        if self.run.program_kept is not None and not self._exchange.is_lost:
            self.run.program_kept.compare(self._team, have_all=self._exchange.have_all)
            for line in self.run.program_kept.left():
                self.run.say_once(line)

    def _collect(self, *, was_left: bool = False) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        with_optimizer = self._exchange.optimizer_state is None
        return self._kept.collect(self._identity, with_optimizer=with_optimizer, was_left=was_left)

    def _wait_for_disk(self) -> None:
        """Wait until the previous checkpoint is on disk, which then sets the pace.

        Without our launcher a worker writes it, and may be lost or stopped meanwhile.
        """
        start_s = time.monotonic()
        is_told, notice_after_s = False, NOTICE.in_s()
        while self._memory.snapshots.is_writing:
            time.sleep(_POLL_S)
            waited_s = time.monotonic() - start_s
            if not self._team.supervisor.can_replace:
                self._team.stop_if_lost()
                if waited_s >= MEETING.in_s():
                    raise WaitTimeoutError(
                        f"the previous checkpoint must be written before the next one, but was "
                        f"not in {waited_s:.1f} s: look at the disk, and at what the worker that "
                        f"writes it does.",
                        missing=(self._team.neighbours[0],),
                        waited_s=waited_s,
                    )
            if not is_told and waited_s >= notice_after_s:
                is_told = True
                if self._checkpoints is not None:
                    self._checkpoints.report_slow_disk(notice_after_s)

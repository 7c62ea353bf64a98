"""One loop over steps: from the moment the workers share the model to the moment they do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from unisono.c10d.forbidden import collectives_watched
from unisono.device import generators_put_back, num_threads
from unisono.plan.samples import SamplePlan
from unisono.state.run_state import RunState
from unisono.step.engine import StepEngine
from unisono.train.boundary import Boundary, BoundaryTasks
from unisono.train.checkpoints import Checkpoints
from unisono.train.compiling import every_shape_compiled
from unisono.train.interrupts import Interrupts, gentle_interrupts
from unisono.workers.joint_calls import JointCalls
from unisono.workers.launcher_messages import Live
from unisono.workers.team import Team
from unisono.world import threads_per_worker


class Loop:
    """A loop under way. Final; made by :func:`loop`.

    Attributes:
        engine: computes its steps.
        is_between_steps: no step is under way.
        has_ended: what it has led to is kept.
    """

    def __init__(
        self, engine: StepEngine, boundary: Boundary, team: Team, kept: RunState, plan: SamplePlan
    ) -> None:
        self.engine = engine
        self.is_between_steps = True
        self.has_ended = False
        self._boundary, self._team, self._kept, self._plan = boundary, team, kept, plan
        self._planned = BoundaryTasks.NOTHING

    def act(self) -> bool:
        """Do what was planned before the next step. Collective.

        Returns:
            Whether the next step is still the next; False if the run had to go back.
        """
        planned, self._planned = self._planned, BoundaryTasks.NOTHING
        if not self.engine.exchange.is_lost:
            self._boundary.act(planned, self._kept.position.step)
        if self.engine.exchange.is_lost:
            self.go_back()
            return False
        return True

    def undo(self) -> None:
        """Put back what the program has changed behind the block of a step that was not done."""
        self._kept.apply_beside(*self.engine.exchange.memory.newest())

    def end(self) -> bool:
        """Keep what the loop has led to, at its end or where it is left. Collective.

        Returns:
            Whether it is kept; False if the run has to go back first, or a step is under way.
        """
        if self.is_between_steps and not self.engine.exchange.is_lost:
            self.has_ended = self._boundary.end(self._kept.position.step)
        return self.has_ended

    def leave(self) -> None:
        """Keep what a loop has led to that the program leaves early.

        Not collective: whether by `break`, everywhere alike, or by an exception that this worker
        alone has, cannot be told here. The leader does what there is to do.
        """
        if self.is_between_steps and not self.engine.exchange.is_lost:
            self.has_ended = self._boundary.leave(self._kept.position.step)

    def plan(self) -> BoundaryTasks:
        """Say what is to be done after the step under way; only the leader's word counts."""
        return self._boundary.plan(self._kept.position.after(self._plan.steps_per_epoch))

    def count(self, means: Mapping[str, float]) -> None:
        """Count a step that is done."""
        position = self._kept.position
        position.advance(self._plan.steps_per_epoch)
        self._kept.last["means"] = dict(means)
        self._planned = BoundaryTasks(self._team.planned(position.step))
        self.is_between_steps = True

    def go_back(self) -> None:
        """Go back to the newest snapshot, as a worker was lost in the midst of an update."""
        self.engine.go_back()
        self._kept.apply_beside(*self.engine.exchange.memory.newest())
        self._planned = BoundaryTasks.NOTHING
        self.is_between_steps = True


@contextmanager
def loop(
    make_engine: Callable[[], StepEngine],
    live: Live | None,
    *,
    team: Team,
    joint_calls: JointCalls,
    kept: RunState,
    plan: SamplePlan,
    identity: Mapping[str, Any],
    checkpoints: Checkpoints | None,
    say: Callable[[str], None],
    before_snapshot: Callable[[], None],
    before_pause: Callable[[], None],
) -> Iterator[Loop]:
    """Share the model among the workers, with generators and threads put back after. Collective.

    Args:
        make_engine: binds the model to shared memory.
        live: how this worker joins a loop that the others are in; None: it begins with them.
        team, joint_calls: the workers, and what they have done together.
        kept: what belongs to the run beside its tensors.
        plan: which samples are computed where.
        identity: what fixes the run's bits, for its checkpoints.
        checkpoints: where checkpoints go; None: nowhere.
        say: where words for the user go.
        before_snapshot, before_pause: see :class:`unisono.train.boundary.Boundary`.
    """
    under_way: Loop | None = None
    try:
        with ExitStack() as stack:
            stack.enter_context(generators_put_back())
            stack.enter_context(num_threads(threads_per_worker()))
            stack.enter_context(every_shape_compiled())
            stack.enter_context(collectives_watched())
            engine = make_engine()
            stack.callback(engine.exchange.unbind)
            interrupts = Interrupts()
            if checkpoints is not None and team.supervisor.is_alone:
                interrupts = stack.enter_context(gentle_interrupts(say))
            boundary = Boundary(
                team,
                engine,
                kept,
                identity,
                checkpoints,
                interrupts,
                before_snapshot,
                before_pause,
            )
            under_way = Loop(engine, boundary, team, kept, plan)
            if live is not None and live.loop is not None:
                kept.apply_beside(*engine.exchange.memory.newest())
                team.faults.meet("join", kept.position.step)
            else:
                _begin(boundary, engine, joint_calls, kept, checkpoints, say)
            try:
                yield under_way
            except GeneratorExit:
                under_way.leave()
                raise
    finally:
        end = json.dumps({"position": kept.position.as_json(), "last": kept.last}).encode()
        joint_calls.leave_loop(end if under_way is not None and under_way.has_ended else None)


def _begin(
    boundary: Boundary,
    engine: StepEngine,
    joint_calls: JointCalls,
    kept: RunState,
    checkpoints: Checkpoints | None,
    say: Callable[[str], None],
) -> None:
    """Take the first snapshot, and tell those who may join where it is."""
    if kept.has_lost_schedule:
        trouble = (
            "a schedule of learning rates steps with the optimizer, but is not kept with the run: "
            'write `run.state["schedule"] = schedule` before the loop'
        )
        boundary.forgo_recovery(trouble)
        if checkpoints is not None:
            say(f"{trouble}; without it a run that is resumed has other learning rates.")
    if boundary.begin():
        facts = {
            **engine.exchange.memory.arena.places.as_json(),
            "shards": engine.exchange.division.num_shards,
        }
        where = {"directory": None} if checkpoints is None else checkpoints.facts
        joint_calls.note_loop({**facts, **where})

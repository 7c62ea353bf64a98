"""One call of ``Trainer.fit``: the loop over steps, and everything that follows each step.

::

    before a step   what changed since the last one ─► callbacks
    the step        (loop.py, step.py)
    after it        callbacks ─► schedule by steps ─► validation ─► callbacks
                    ─► schedule by validations, by epochs ─► callbacks
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

from torch import nn
from typing_extensions import override

from unisono.data.data_reading import is_stream
from unisono.engine.state.contents import digest_of
from unisono.runtime.habits import attributes_met
from unisono.runtime.signals import interruption
from unisono.runtime.workers.membership import Membership
from unisono.training.callbacks.callback import Callback, Callbacks, Times
from unisono.training.callbacks.progress import Progress
from unisono.training.callbacks.summary import Summary, scalars_text
from unisono.training.epoch_history import epoch_loss, note_step, rows
from unisono.training.failures import note_left_by
from unisono.training.first_steps import LabelCounts
from unisono.training.fit_totals import FitTotals
from unisono.training.growth import Growth
from unisono.training.identity import environment_facts, identity
from unisono.training.loop import begin_loop
from unisono.training.loop_plan import LoopPlan
from unisono.training.out_of_memory import MemoryWatch
from unisono.training.pace import Pace
from unisono.training.rehearsals import Rehearsals
from unisono.training.restored import as_it_was
from unisono.training.run import Run, context_of
from unisono.training.run_context import Observer
from unisono.training.schedule import Conclusions, Drawn, ScheduleUnderWay, Validation
from unisono.training.step import Step, is_due
from unisono.training.whole_batch import from_the_same_buffers

_FAILED = "callbacks that failed"  # in ``run.last``: in which loop, and their names
# The membership before a replacement continues alone, because all workers were lost.
_NOBODY = Membership((), leader=-1, generation=-1)


@final
@attributes_met("`fit`")
class FitUnderWay(Observer):
    """Implements :class:`Fit` and :class:`Observer` for one call of ``fit``."""

    def __init__(
        self,
        run: Run,
        plan: LoopPlan,
        loss: Callable[[nn.Module, Any], Any],
        callbacks: Callbacks,
        validation: Validation,
        schedule: ScheduleUnderWay,
        embed: Callable[[nn.Module, Any], Any] | None = None,
        validated: Callable[[], nn.Module] | None = None,
    ) -> None:
        self._run, self._context = run, context_of(run)
        self._plan, self._callbacks = plan, callbacks
        self._loss, self._embed, self._validated = loss, embed, validated
        reading = plan.reading
        functions = {"loss": loss, "embed": embed}
        can_read = not is_stream(reading.dataset)
        self._rehearsals = Rehearsals(
            self._context, functions, can_read=can_read, reads=plan.program
        )
        self._looks = self._next = 0
        self._validation = validation
        self._conclusions = Conclusions(run, schedule, validation, callbacks, self, self._validate)
        self._progress = next(c for c in callbacks if isinstance(c, Progress))
        modules = {type(callback).__module__ for callback in callbacks}
        self.runs_program_code = not all(name.startswith("unisono.") for name in modules)
        self.own_callbacks = {
            name: callback
            for name, callback in zip(callbacks.names, callbacks, strict=True)
            if not type(callback).__module__.startswith("unisono.")
        }
        team = self._context.team
        self._said: set[str] = set()
        self._membership = team.membership
        self._has_begun, self._is_over = False, True
        self._labels, self._growth = LabelCounts(self._context), Growth(self._context)
        self._kept_step: int | None = None
        self._pace: Pace | None = None
        self._has_skipped = self.has_ended = False
        self._memory, self._has_memory = MemoryWatch(run.device, team), not run.device.is_host
        self.end_step = run.position.step
        self.rank, self.model, self.optimizer = team.world.rank, run.model, run.optimizer

    def go_through(self, computing: AbstractContextManager[None]) -> Summary:
        """Compute all steps within `computing`. Collective: every rank calls it."""
        run, plan = self._run, self._plan
        loss, functions = None if self._embed else self._loss, (self._loss, self._embed)
        steps = begin_loop(self._context, plan, observer=self, loss=loss, functions=functions)
        self._is_over = False
        self.end_step = plan.totals.end_step(plan.samples, run.position)
        try:
            if not run.is_ahead and run.last.get("stopped_by") not in self._callbacks.names:
                run.go_on()
            if line := self._conclusions.check(plan, self.end_step):
                self._context.say_once(line)
            self._conclusions.begin()
            self._totals = FitTotals(run.position, run.last)
            if run.device.is_host and self._context.team.size > 1:  # elsewhere passes end later
                self._pace = Pace(self._context.team, run.position.step)
            with computing:
                for step in steps:
                    self._before(step)
                    self._compute(step)
                    self._after(step)
            return self._end()
        except BaseException as error:
            self._conclusions.note_left()
            note_left_by(run.last, self._context.num_loops, error)
            self._fail(error)
            raise
        finally:
            steps.close()
            self._rehearsals.close()
            self._is_over = True

    @property
    @override
    def acts_at_begin(self) -> bool:  # type: ignore[override]
        own = self.own_callbacks.values()
        return self._conclusions.left is not None or any(
            getattr(one.on_begin, "__func__", None) is not Callback.on_begin for one in own
        )

    @property
    def validated_model(self) -> nn.Module:
        """The model to validate: `model`, or what ``fit(validate_model=…)`` returns now."""
        return self.model if self._validated is None else self._validated()

    @property
    def directory(self) -> Path | None:
        """The run directory, or None."""
        return None if self._context.checkpoints is None else self._context.checkpoints.directory

    @property
    def step(self) -> int:
        """Number of steps done over the whole run."""
        return self._run.position.step

    @property
    def epoch(self) -> int:
        """Number of epochs done."""
        return self._run.position.epoch

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that compute together now, in ascending order."""
        return self._context.team.membership.ranks

    @property
    def is_leader(self) -> bool:
        """Whether this worker writes for all; False if it repeats what others have done."""
        return self._context.team.is_leader and not self._context.replicated_calls.is_behind

    @property
    def is_first(self) -> bool:
        """Whether this worker has the lowest rank, and so draws on the terminal."""
        return self._context.team.position == 0 and not self._context.replicated_calls.is_behind

    @property
    def has_joined(self) -> bool:
        """Whether this worker joined later than the others, as a replacement."""
        return self._run.has_joined or self._context.replicated_calls.is_behind

    @functools.cached_property
    def facts(self) -> Mapping[str, Any]:
        """Identity, versions, machine, command and sizes of the run, as JSON values."""
        run, plan = self._run, self._plan.samples
        is_kept = self._context.checkpoints is not None
        return {
            # 0: unknown.
            "steps_per_epoch": 0 if plan.is_endless else plan.steps_per_epoch,
            "num_samples": 0 if plan.is_endless else plan.num_samples,
            "batch_size": 0 if plan.cuts is not None else plan.batch_size,
            "shards": plan.shards,
            "seed": plan.seed,
            "world_size": self._context.team.world.world_size,
            "num_parameters": sum(p.numel() for p in run.model.parameters()),
            "identity": identity(plan, run.fixed, run.device, is_kept=is_kept),
            "loader_workers": self._plan.reading.loader_workers,
            **environment_facts(run.device),
        }

    def pid(self, rank: int) -> int | None:
        """Return the process ID of a worker, or None if unknown, as on another host."""
        team = self._context.team  # a process ID means nothing on another host
        return team.pid(rank) if rank in team.neighbours else None

    def times(self, rank: int, step: int) -> Times | None:
        """Return a worker's times in one of the last two steps, or None."""
        times = self._context.team.times(rank, step)
        return None if times is None else Times._make(times)

    def memory(self, rank: int) -> int | None:
        """Return the bytes of device memory that a worker's tensors last used; None on CPUs."""
        return self._context.team.memory_of(rank) if self._has_memory else None

    def say(self, line: str) -> None:
        """Print one line for the user without disturbing the progress bar."""
        self._progress.say(self, line)

    def once(self, work: Callable[[], str], purpose: str) -> str:
        """Run `work` on the leader, and return its result on every worker. Collective."""

        def speak() -> bytes:
            return work().encode(errors="backslashreplace")

        return self._context.replicated_calls.broadcast_from_leader(speak, purpose).decode()

    def written_checkpoint(self) -> Path | None:
        """Wait until the leader's newest checkpoint is written, and return its folder."""
        return None if self._context.checkpoints is None else self._context.checkpoints.written()

    def check_directory(self) -> str:
        """Check that the run directory is still the run's; return why not, or nothing."""
        checkpoints = self._context.checkpoints
        return "" if checkpoints is None else checkpoints.check_directory()

    def stop(self, why: str) -> None:
        """End the run after the current step. Collective."""
        self._run.stop()
        calling = self._callbacks.calling
        self._run.last["stopped_by"] = "" if calling is None else calling.name
        self._say_once(why)

    @override
    def before_snapshot(self) -> None:
        if self._has_begun and not self._is_over:  # a loop begins with a snapshot
            self._callbacks.call("on_snapshot", self)
            if failed := self._callbacks.failed:
                self._run.last[_FAILED] = [self._context.num_loops, failed]

    @override
    def before_pause(self) -> None:
        if not self._is_over and (signum := self._context.team.is_ended_by):
            # The launcher ends this process during the pause.
            self._fail(interruption(signum))

    def _before(self, step: Step) -> None:
        """Report to callbacks what changed since the last step, and that a step begins."""
        self._check_membership()
        if step.number < self._next:
            from_step, self._next = self._next, step.number
            if self._kept_step is not None and self._kept_step > self.step:
                self._kept_step = None
            self._leave_out_failed()
            self._callbacks.call("on_went_back", self, from_step)
        self._find_checkpoints()
        self._callbacks.call("on_step_begin", self)

    def _compute(self, step: Step) -> None:
        model, loss = self.model, self._loss
        looks_closely = is_due(self._looks, step.number) or step.number + 1 == self.end_step
        self._looks += looks_closely
        with step:
            if self._embed is not None:
                if looks_closely:  # rehearsals may compute it several times
                    loss = from_the_same_buffers(loss)
                watched = self._rehearsals.watched(step, self._embed, loss, is_due=looks_closely)
                step.gather(*watched)
                return
            shards = step.shards
            if looks_closely:
                self._rehearsals.begin()
                loss = self._labels.watching(loss)
                for batch in itertools.islice(shards, 1):
                    self._rehearsals.compute(step, batch, loss)
                    if self._rehearsals.is_exact:
                        self._growth.check(step, batch, self._loss, self._rehearsals)
            for batch in shards:
                step.backward(loss(model, batch))
            if looks_closely:
                self._rehearsals.note_stored()

    def _after(self, step: Step) -> None:
        """Act on a finished step: callbacks, schedule, validation."""
        if step.is_done:
            self._totals.count(step.number, step.num_samples)
            # A loss of the whole batch gives one mean a step, with weight 1.
            weight_of = 1 if self._embed is None else step.num_samples
            note_step(self._run.last, step.means, step.num_samples, self._run.position, weight_of)
        # Checked now: another worker may have joined by the time the next step begins.
        self._check_membership()
        if not step.is_done:
            return
        self._next = step.number + 1
        if self._has_memory:
            self._memory.measure()
        if self._growth.is_open:
            self._growth.check_step(step)
        if self._pace is not None and (line := self._pace.record_step(step.number)):
            self._say_once(line)
        if step.is_skipped and not self._has_skipped:
            self._has_skipped = True
            self.say(
                f"step {step.number} is skipped because its gradients overflow in float16; the "
                f"loss scale is lowered until they do not (shown once)"
            )
        if step.number == self._totals.begun_at.step:
            with self._totals.paused():
                self._validation.check_monitors(step.means)
        self._conclusions.drawn = Drawn.NONE
        self._callbacks.call("on_step_end", self, step)
        self._conclusions.draw()

    def _fail(self, error: BaseException) -> None:
        """Call ``on_error`` of every callback, and report what it raises."""
        for callback in self._callbacks:
            try:
                callback.on_error(self, error)
            except Exception as another:
                self.say(
                    f"the callback {callback.name} failed in `on_error`: "
                    f"{type(another).__name__}: {another}"
                )

    @override
    def begin(self) -> None:
        if self._is_over:  # the loop belongs to the program
            return
        team = self._context.team
        self._has_begun, self._next = True, self.step
        # A replacement that is the leader has found no other worker.
        is_alone = self._context.replicated_calls.is_behind or (self.has_joined and team.is_leader)
        self._membership = _NOBODY if is_alone else team.membership
        if self._context.checkpoints is not None:
            self._kept_step = self._context.checkpoints.kept_step
        if self._has_memory:
            self._memory.begin()
        self._leave_out_failed()
        with as_it_was(self._context) if self.own_callbacks else nullcontext():
            self._callbacks.call("on_begin", self)
        self._context.has_begun()
        self._conclusions.draw_left()

    def _leave_out_failed(self) -> None:
        """Leave out the program's callbacks that had failed when the run's state was saved."""
        loop, failed = self._run.last.get(_FAILED, (0, ()))
        names = failed if loop == self._context.num_loops else ()
        self._callbacks.leave_out(names, again=self.own_callbacks.values())

    def _end(self) -> Summary:
        """Run end-of-fit actions once all steps are done, even if other workers did them."""
        self.has_ended = True
        is_new = self.step > self._totals.begun_at.step or self._conclusions.left is not None
        if not is_new:  # the program's callbacks repeat what they did after the last snapshot
            self._callbacks = Callbacks([*self.own_callbacks.values()])
        if is_new or self._context.has_ended:
            if not self._has_begun:
                self.begin()
            if self._validation.newest is None:
                self._validate(f"step {self.step}")
        summary = self._summary()
        if self._has_begun:
            self._check_membership()
            self._find_checkpoints()
            self._callbacks.call("on_end", self, summary)
        if summary.steps:
            self.say(str(summary))
        return summary

    def _summary(self) -> Summary:
        """Return the summary of the call, with the leader's digest and clock on every worker."""
        run, totals = self._run, self._totals

        def speak() -> bytes:
            found = {
                "seconds": totals.seconds(run.last),
                "digest": digest_of(run.model, run.optimizer),
                "workers_at_end": len(self.ranks),
            }
            return json.dumps(found).encode()

        heard = self._context.replicated_calls.broadcast_from_leader(speak, "summary")
        samples = totals.samples_until(run.last)
        summary = Summary(
            steps=run.position.step - totals.begun_at.step,
            samples=samples,
            shards=self._plan.samples.shards,
            workers=self._context.team.world.world_size,
            means=run.last.get("means", {}),
            validation=run.last.get("validation"),
            **json.loads(heard),
        )
        summary.extend(rows(run.last, run.position))
        return summary

    def _check_membership(self) -> None:
        if self._context.replicated_calls.is_behind:
            return
        before, self._membership = self._membership, self._context.team.membership
        if self._membership.generation != before.generation:
            self._callbacks.call("on_workers_changed", self, before.ranks, self._membership.why)

    def _find_checkpoints(self) -> None:
        checkpoints = self._context.checkpoints
        if checkpoints is None or checkpoints.kept_step != self.step:
            return
        if self._kept_step != self.step:
            self._kept_step = self.step
            self._callbacks.call("on_checkpoint", self, self.step)

    def _validate(self, when: str) -> None:
        if not self._validation.has_data:
            return
        began_at_s = time.perf_counter()
        with self._totals.paused():
            means = self._validation.compute()
        if self._conclusions.drawn is not None:
            self._conclusions.drawn = Drawn.VALIDATION
        seconds = time.perf_counter() - began_at_s
        self._check_membership()
        trained = epoch_loss(self._run.last, self._run.position)
        self._say_once(f"{when}: validation {scalars_text(means)}{trained}")
        self._callbacks.call("on_validation", self, means, seconds)

    def _say_once(self, line: str) -> None:
        """Print a line, unless it was printed before this call repeated its steps."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)

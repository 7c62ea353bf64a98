"""One step, with any exchange.

::

    each shard      seed → buffers back → forward, backward → add to a part
    publish         finished parts and the shards' records
    gather          ─────────────────────────────────────  worker lost: its shards, gather again
    add up          this worker's pieces of all parts, in tree order
    transform       unscale, `on_gradients`, clip (transforms.py)
    update          the optimizers, by pieces or whole
    share           ─────────────────────────────────────  state lost with a worker: go back

Parameters change between `gather` and `share`; elsewhere no worker writes what another reads. If
a worker is lost before `gather`, the others compute its shards, and nothing else is lost. What a
later loss costs depends on the exchange. World size 1 follows the same path.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.exchange import Exchange
from unisono.engine.state.contents import updated_parameters
from unisono.engine.state.modes import Modes
from unisono.engine.state.optimizers import optimizers_of
from unisono.engine.step.between_steps import BetweenSteps
from unisono.engine.step.loss import ShardLoss, check_differentiable, is_known_bad, read_loss
from unisono.engine.step.loss_scaling import LossScaling, check_alone
from unisono.engine.step.model_guard import ModelGuard
from unisono.engine.step.records import Phase, PhaseTimers, Records, StepMeans
from unisono.engine.step.shard_passes import ShardPasses
from unisono.engine.step.transforms import (
    Clipping,
    GradientHook,
    OnGradients,
    Sums,
    UpdateVerdict,
    Watch,
    clip_norms,
    clip_values,
)
from unisono.engine.step.update import LoopOptimizer, Options, pass_for_stepped
from unisono.errors import NonFiniteLossError
from unisono.programs.generators import OwnGenerators
from unisono.runtime.forbidden import IN_A_PASS, IN_AN_UPDATE, forbid
from unisono.runtime.notices import say
from unisono.runtime.workers.team import Team

_NO_FAULT = operator.is_  # takes two things and does nothing, in C


class StepEngine:
    """Computes the steps of one loop.

    `clipping` and `scaling` are by optimizer; ways to combine `buffers`, by name. The `own`
    generators of a program are seeded with the default ones. Unless it `watches_program`, changes
    between steps are searched only occasionally. If devices `are_alike`, replicas are compared.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Exchange,
        *,
        seed: int,
        team: Team,
        clipping: Mapping[str, Clipping] | None = None,
        scaling: Mapping[str, LossScaling] | None = None,
        timers: PhaseTimers | None = None,
        on_gradients: OnGradients | None = None,
        own: OwnGenerators | None = None,
        buffers: Mapping[str, str] | None = None,
        watches_program: bool = True,
        are_alike: bool = True,
    ) -> None:
        clipping, scaling = clipping or {}, scaling or {}
        self.optimizers = {
            name: LoopOptimizer(name, one, clipping.get(name, Clipping()), scaling.get(name))
            for name, one in optimizers_of(optimizer).items()
        }
        self._all = list(self.optimizers.values())
        self.model, self._optimizer = model, optimizer
        self.exchange, self._team = exchange, team
        self._meet_fault = team.faults.meet if team.faults.are_planned else _NO_FAULT
        self.timers, self._watches_program = timers or PhaseTimers(), watches_program
        self.records, self._options = Records(exchange), Options(optimizer)
        self.guard = ModelGuard(model, optimizer, exchange.fixed)
        self.passes = ShardPasses(exchange, seed, own, buffers)
        compares = watches_program and are_alike
        self.between = BetweenSteps(
            exchange, team, self.guard, self.passes, self._all, self.records, compares=compares
        )
        self.sums = Sums(exchange, self.timers, list(updated_parameters(model, optimizer)))
        self._hook = on_gradients and GradientHook(on_gradients, self.passes.seed)
        self._modes, self._has_told = Modes(model), team.position != 0
        self._first_shard = self._turn = 0
        self._may_update = False  # another worker may, as all have arrived in this step
        self._wire(self._all)

    def _wire(self, optimizers: list[LoopOptimizer]) -> None:
        """Set which optimizers are updated from now on."""
        self._active = optimizers
        scaling = next((one.scaling for one in optimizers if one.scaling), None)
        self.passes.scaling = scaling
        clippings = [(one.clipping, one.parameters) for one in optimizers]
        values = [(clip.value, own) for clip, own in clippings if clip.value is not None]
        norms = [(clip.norm, own) for clip, own in clippings if clip.norm is not None]
        clips = values and partial(clip_values, values), norms and partial(clip_norms, norms)
        self._transforms = [one for one in (scaling, self._hook, *clips) if one]
        self.sums.has_norm = bool(norms)
        active = {index for one in optimizers for index in one.parameters}
        each = enumerate(self.exchange.parameters)
        self.passes.others = [parameter for at, parameter in each if at not in active]

    def watch_gradients(self, watch: Watch) -> None:
        """Observe the next call of `on_gradients`."""
        if self._hook is not None:
            self._hook.watch = watch

    def begin(self, step: int, first_shard: int) -> None:
        """Start a step; `first_shard` is the first one that has samples in it."""
        self.sums.step, self._first_shard, self._may_update = step, first_shard, False
        self.begin_update(self._all, 0)
        self._meet_fault("begin", step)
        if self.passes.watch is not None:
            self.passes.watch.begin(self.model, self.sums.names)
        self.timers.begin()

    def begin_update(self, optimizers: list[LoopOptimizer], turn: int) -> None:
        """Begin update number `turn` of the step, for some of the optimizers."""
        if optimizers is not self._active:
            self._wire(optimizers)
        self._turn, self.sums.named = turn, f"of step {self.sums.step}"
        if turn or len(optimizers) < len(self.optimizers):  # shorter, as meetings have 24 letters
            names = "+".join(one.name for one in optimizers)
            self.sums.named = f"{self.sums.step}.{turn} {names}"
        self.begin_again()

    def begin_again(self) -> None:
        """Prepare for the passes of all shards, which a new membership may divide differently."""
        division = self.exchange.division
        if division.divided_for is not self._team.membership and division.is_outdated:
            self.between.divide()
        self.guard.begin(self.sums.step)
        self.passes.begin(self.sums.step, self._first_shard, self._turn)
        self.records.clear()

    def begin_passes(self) -> Sequence[int]:
        """Return this worker's shards; collectives are refused until :meth:`end_passes`."""
        if self.passes.scaling is not None:
            check_alone([one.name for one in self._active])
        if self._watches_program or self.guard.looks_closely:
            self.between.publish_changes(self.sums.step)
        number = self._options.note()
        # Where the leader alone updates, its options alone count.
        self.records.options = number if self.exchange.have_all else 0
        self._modes.note()
        forbid(IN_A_PASS)
        return self.passes.shards

    def start_shard(self, shard: int) -> None:
        """Prepare for one shard's forward pass, once it has been read."""
        self.timers.lap(Phase.LOADING)
        self._meet_fault("shard", self.sums.step)
        self._put_modes_back()
        self.passes.start(shard)
        self.guard.release_gradients()

    def finish_shard(self, shard: int, returned: Any, num_samples: int, share: float) -> None:
        """Compute the gradients of one shard's loss, and add them to a part.

        `returned` is the result of the loss function, `share` the shard's fraction of the samples.
        """
        self.timers.lap(Phase.FORWARD)
        loss = read_loss(returned, num_samples, is_first=shard == self._first_shard)
        self.guard.check_gradients()
        self.records.add(shard, loss)
        if self.passes.scaling is None and is_known_bad(loss):
            # All workers will read its record and raise the same error; none updates anything.
            finished = self.passes.stack.push_nothing(shard)
        else:
            check_differentiable(loss)
            finished = self.passes.add(shard, loss, share)
        if finished is not None:
            self.exchange.publish(*finished)
        self.guard.guard_gradients()
        self.timers.lap(Phase.BACKWARD)

    def give_shard(self, shard: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Use a program's gradients for the whole step as those of its first shard."""
        self.passes.start(shard)
        self.guard.release_gradients()
        is_first = shard == self._first_shard
        for name, parameter in zip(self.sums.names, self.exchange.parameters, strict=True):
            if is_first and name in gradients:
                parameter.grad = gradients[name].detach().to(parameter, copy=True)
        nothing = ShardLoss(torch.zeros(()), True, {"loss": (0.0, float(is_first))})
        self.records.add(shard, nothing)
        finished = self.passes.collect(shard)
        if finished is not None:
            self.exchange.publish(*finished)
        self.guard.guard_gradients()

    def skip_shard(self, shard: int) -> None:
        """Record that a shard has no samples in this step."""
        finished = self.passes.stack.push_nothing(shard)
        if finished is not None:
            self.exchange.publish(*finished)
        self.records.write(shard, None)

    def check_passes(self) -> None:
        """Raise RuntimeError if passes changed what they must not change."""
        self.guard.check_passes()
        self._options.check()
        looks = self.guard.looks_closely or self.exchange.is_written_in_passes
        if looks and (name := self.exchange.changed_name()):
            raise self.guard.changed_in_a_pass(name)

    def arrive(self) -> Sequence[int] | None:
        """Wait for the other workers once this worker's shards are done. Collective.

        Return None if all shards of the step are done. Otherwise a worker was lost: compute the
        returned shards (there may be none), then call this again.
        """
        self.check_passes()
        self._meet_fault("gradients", self.sums.step)
        # Here, and nowhere else in a plain step, the host waits for the device.
        if self.records.pending.losses:
            self.records.send()
        self.timers.lap(Phase.BACKWARD)
        more = self.exchange.gather(f"gradients {self.sums.named}")
        self.timers.lap(Phase.WAITING)
        if more is not None:
            # The snapshot is not known to be whole; the one before it still is.
            self.between.copied = None
            # Now, while no worker updates: the optimizer's state must be read as this step's.
            self.between.follow_updates()
            return self.passes.take_over(more)
        self._may_update = True
        if self.between.copied is not None:
            self.between.complete()
        read = self.records.read()
        if self.between.compares:
            self.exchange.check_replicas({record.seen for record in read} - {0})
        self.guard.guard_gradients()  # also where no shard of this worker's had samples
        self.passes.leave_shards()
        return None

    @property
    def is_unchanged(self) -> bool:
        """Whether the state that all share is that before the step, and can be copied at once.

        An accelerator may still copy gradients of the step.
        """
        is_copied = not self.exchange.device.is_host
        return not (self._may_update or is_copied or self.exchange.is_written_in_passes)

    def end_passes(self) -> None:
        """Allow collectives again."""
        forbid("")
        self._put_modes_back()

    def repeat(self, shard: int) -> None:
        """Prepare to repeat one shard's passes, from the state that the step began with."""
        self._modes.put_back()
        self.passes.repeat(shard)

    def _put_modes_back(self) -> None:
        if self._modes.put_back() and not self._has_told:
            self._has_told = True
            say(
                "a pass has changed the mode of a layer (`train()` or `eval()`); each shard starts "
                "with the modes that the step began with: change them between steps, in "
                "`on_step_begin`"
            )

    def finish(self) -> tuple[StepMeans, bool]:
        """Sum and update. Collective: every rank calls it once the step's shards are done.

        Return the means by name, and whether the step is done; if not, a worker was lost during the
        update: call :meth:`BetweenSteps.roll_back`. A NonFiniteLossError changes nothing.
        """
        means, is_whole = self._sum()
        if not is_whole:
            return means, False
        self._meet_fault("update", self.sums.step)
        if self.exchange.optimizer_state is None:
            self.passes.seed("update")  # a whole update may draw
        before = forbid(IN_AN_UPDATE)  # one worker may do it for all
        try:
            for one in self._active:
                if self.sums.are_skipped:
                    pass_for_stepped(one.optimizer)
                else:
                    one.update.apply(self.sums.present)
        finally:
            forbid(before)
        return means, self._settle()

    def _sum(self) -> tuple[StepMeans, bool]:
        """Sum and transform gradients; return and raise as :meth:`finish` does. Collective."""
        exchange, sums, step = self.exchange, self.sums, self.sums.step
        sums.norm, sums.are_skipped, sums.bad = None, False, self.records.bad
        self.guard.check_untouched()
        self.guard.release_gradients()
        try:
            if sums.bad is not None and self.passes.scaling is None:
                self._team.meet(f"bad loss {sums.named}")
                shard, value = sums.bad
                raise NonFiniteLossError(
                    f"the loss must be finite, but is {value} in step {step} for shard {shard}; "
                    f"the parameters are still those before step {step}: lower the learning rate, "
                    f"or look at that shard's samples for values that are not finite.",
                    step=step,
                    shard=shard,
                    value=value,
                )
            means, weight = self.records.totals()
            if exchange.is_lost:
                return means, False
            self._meet_fault("sums", step)
            sums.present = exchange.add_up(f"sums {sums.named}")
            if len(self.optimizers) > 1:
                for one in self._active:
                    one.check_reached(sums.present, step)
            if weight is not None:
                sums.divide(weight)
            verdict = UpdateVerdict.GO_ON
            for transform in self._transforms:
                if (verdict := transform(sums)) is not UpdateVerdict.GO_ON:
                    break
        except NonFiniteLossError:
            exchange.buffers.restore()  # as the step found them, the same on every worker
            self._may_update = self._turn > 0  # all workers raise it
            raise
        sums.are_skipped = verdict is UpdateVerdict.SKIP
        are_here = verdict is not UpdateVerdict.LOST
        self.timers.lap(Phase.SUMMING)
        if are_here and exchange.optimizer_state is None:
            are_here = sums.meet(exchange.all_sums, "sums")
        return means, are_here

    def _settle(self) -> bool:
        """Publish the update to all workers. Return False if one was lost during it. Collective."""
        self._meet_fault("updated", self.sums.step)
        self.timers.lap(Phase.UPDATING)
        is_everybodys = self.exchange.share(f"update {self.sums.named}")
        self.timers.lap(Phase.WAITING)
        if not is_everybodys:
            return False
        for one in self._active:
            one.update.commit()
        self.passes.commit()
        if self.passes.scaling is not None:
            self.passes.scaling.update(is_skipped=self.sums.are_skipped)
        if self.exchange.references.all:
            self.exchange.references.show()
        self.guard.remember()
        self.passes.seed("between")
        self.timers.lap(Phase.UPDATING)
        self._meet_fault("commit", self.sums.step)
        if self.passes.watch is not None:
            self.passes.watch.done(self.model, self._optimizer)
        return True

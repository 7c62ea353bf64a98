"""What the parts of one run share: its state, workers, checkpoints and observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, final

from torch import nn

from unisono.data.data_reading import Reading, length_of
from unisono.data.fingerprint import fingerprint_of_data
from unisono.engine.exchange.snapshots import RunMemory
from unisono.engine.state.optimizers import needs_closure
from unisono.engine.state.run_state import RunState
from unisono.engine.step.engine import StepEngine
from unisono.engine.step.loss_scaling import LossScaling
from unisono.engine.step.shard_passes import ShardPasses
from unisono.plan.samples import SamplePlan
from unisono.plan.shards import default_shards
from unisono.programs.account import Account
from unisono.programs.frames import KeptFrame
from unisono.programs.holders import Holder
from unisono.programs.kept import KeptProgram
from unisono.programs.live import variables_of
from unisono.programs.unlike import Unlike
from unisono.runtime.device import Device
from unisono.runtime.notices import say
from unisono.runtime.workers.replicated_calls import ReplicatedCalls
from unisono.runtime.workers.team import Team
from unisono.training.checkpoints import Checkpoints
from unisono.training.loop_plan import LoopPlan, Totals
from unisono.training.options import RunOptions
from unisono.training.sample_planning import check_covers, plan_samples

LOOKED_AT_LOOPS = 8  # of many, in one place


class Observer:
    """Observes a run; this base class serves custom training loops and prints all lines."""

    runs_program_code = True
    own_callbacks: Mapping[str, Any] = MappingProxyType({})
    acts_at_begin = False  # whether `begin` may change what is saved with the run

    def say(self, line: str) -> None:
        """Print one line for the user."""
        say(line)

    def begin(self) -> None:
        """Called on every worker before its first step in a loop."""

    def before_snapshot(self) -> None:
        """Called on every worker before the state of the run is copied."""

    def before_pause(self) -> None:
        """Called on every worker before all pause between two steps, possibly for good."""


@final
@dataclass(slots=True)
class RunContext:
    """What the parts of one run share."""

    options: RunOptions  # what the program passed
    kept: RunState  # the run's progress, and everything saved with it
    team: Team  # the workers
    replicated_calls: ReplicatedCalls  # results of what they did together
    scaling: Mapping[str, LossScaling]  # loss scaling, by optimizer name
    fixed: dict[str, Any]  # determines the bits, besides samples and versions
    is_unseeded: bool  # random numbers were drawn without a seed before the run was created
    exchange: str  # the name of the exchange that sums gradients
    device: Device  # of this worker
    shards: int | None  # S; None before the first loop if the program did not set it
    checkpoints: Checkpoints | None = None  # None: the run has no directory
    observer: Observer = field(default_factory=Observer)  # observes the run now
    # computes a batch's loss; None in loops where the program does
    loss: Callable[[nn.Module, Any], Any] | None = None
    frame: KeptFrame | None = None  # of the program's own loop, while it runs
    takers: Sequence[KeptFrame] = ()  # if that is of a generator, those that take what it yields
    functions: Sequence[Any] = ()  # the program's, called in the loop's passes, as far as known
    engine: StepEngine | None = None  # computes the steps of the current loop
    memory: RunMemory | None = None  # of the newest loop
    seen: tuple[int, dict[str, str]] | None = None  # loop number, dataset fingerprint
    first_loss: str = ""  # see `first_loss.py`
    plan: SamplePlan | None = None  # the samples of the current epoch
    has_resumed: bool = False  # a checkpoint was loaded, or there is none
    has_joined: bool = False  # see `unisono.Run`
    is_ahead: bool = False  # see `unisono.Run`
    has_ended: bool = False  # the newest loop ended in an earlier process of this program
    program_kept: KeptProgram | None = None  # what the program changes between steps
    num_loops: int = 0  # that the program has reached
    # counts of the program: as they were first seen, and those that differ in the newest loop
    first_counts: dict[str, int] = field(default_factory=dict)
    course: dict[str, int] = field(default_factory=dict)
    loop: str = ""  # identifies the newest loop across restarts
    goes_on: bool = False  # `unisono.Run.go_on` was called after the last stop
    are_mixed: bool | None = None  # whether devices compute different bits; None before a loop
    # how many custom loops began, by their code and their position in it
    loops_seen: Counter[Any] = field(default_factory=Counter)
    unlike: Sequence[Unlike] = ()  # values that differed between workers when the loop began
    # numbers that passes in training add to, by path: the place, and what was there at first
    sums: dict[str, tuple[Holder, Account]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)  # lines shown, of those shown once in a run

    @property
    def program(self) -> dict[str, Any]:
        """The program's objects that take part in a step, by name."""
        kept = self.kept
        return {
            "loss": self.functions,
            "loop": {} if self.frame is None else variables_of(self.frame),
            **{f"loop{at}": variables_of(one) for at, one in enumerate(self.takers, 1)},
            "model": kept.model,
            "optimizer": kept.optimizer,
            "on_gradients": self.options.on_gradients,
            "hooks": {
                name: [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
                for name, parameter in kept.model.named_parameters()
            },
        }

    @property
    def is_looked_at(self) -> bool:
        """Whether the loop under way is one of the first eight, or of every eighth after those."""
        before = self.num_loops - 1
        return before < LOOKED_AT_LOOPS or before % LOOKED_AT_LOOPS == 0

    def say(self, line: str) -> None:
        """Print one line for the user."""
        self.observer.say(line)

    def say_once(self, line: str) -> None:
        """Print one line once in the whole run, if this worker speaks for all."""
        if line not in self.told:
            self.told.add(line)
            if ShardPasses.watch is not None:
                ShardPasses.watch.told(line)
            if self.team.position == 0 and not self.replicated_calls.is_behind:
                self.say(line)

    def has_begun(self) -> None:
        """Restore what the program keeps itself, once a loop has begun on this worker."""
        drawn, passes = None, None if self.engine is None else self.engine.passes
        if self.program_kept is not None:
            is_alone = passes is None or self.has_joined or self.replicated_calls.is_behind
            drawn_now = list if passes is None else passes.drawn
            team = None if is_alone else self.team
            drawn = self.program_kept.has_begun(self.num_loops, drawn_now, team)
        if passes is not None:  # None: other workers have done all steps
            passes.draw_on(drawn, self.kept.position.step)

    @property
    def takes_closure(self) -> bool:
        """Whether the optimizer is called with a closure."""
        return needs_closure(self.kept.optimizer)

    @property
    def is_deterministic(self) -> bool:
        """Whether torch must use deterministic kernels; those of the CPU are."""
        return self.options.exact and not self.device.is_host

    @property
    def is_stopped(self) -> bool:
        """Whether the run has reached the step at which it was stopped."""
        stopped_at = self.kept.last.get("stopped_at")
        return isinstance(stopped_at, int) and self.kept.position.step >= stopped_at

    def plan_loop(self, reading: Reading, epochs: int | None, steps: int | None) -> LoopPlan:
        """Return the plan of a loop over a dataset; raises as :func:`plan_samples` does."""
        seed = self.options.seed
        samples = plan_samples(reading, self.shards, seed, steps, may_be_endless=epochs is None)
        return LoopPlan(reading, samples, Totals(epochs, steps))

    def plan_pass(self, reading: Reading) -> SamplePlan:
        """Return the plan of a pass without training; raises as :func:`plan_samples` does."""
        whole = plan_samples(reading, 1, self.options.seed)
        if whole.cuts is not None:
            check_covers(whole, length_of(reading.dataset))
        shards = self.options.shards or default_shards(whole.batch_size)
        batch_size = shards * whole.batch_size
        return replace(whole, batch_size=batch_size, shards=shards, in_blocks=True)

    def is_over(self, totals: Totals) -> bool:
        """Return whether the run has nothing left to do."""
        is_at_end = self.is_stopped or totals.are_reached(self.kept.position)
        return self.is_ahead or is_at_end or totals.were_left(self.kept.last, self.num_loops)


def samples_seen(run: RunContext, plan: LoopPlan) -> dict[str, str]:
    """Return a fingerprint of the loop's dataset, taken once per loop, before state is restored."""
    if run.seen is None or run.seen[0] != run.num_loops:
        run.seen = run.num_loops, samples_now(plan)
    return run.seen[1]


def samples_now(plan: LoopPlan, stream: str = "train") -> dict[str, str]:
    """Return a fingerprint of a few samples of the loop's dataset, as in epoch 0."""
    reading = plan.reading
    return fingerprint_of_data(
        reading.dataset,
        length_of(reading.dataset),
        seed=plan.samples.seed,
        stream=stream,
        epoch=0,
        in_fork=reading.loader_workers > 0,
    )

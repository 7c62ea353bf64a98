"""What the parts of one run share: its state, its workers, its checkpoints, its observer.

The order of samples that a sampler says is compared by its hash: between the workers when an epoch
begins, and with the one that the epoch has begun in when a run goes on in the midst of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, MappingProxyType
from typing import Any, final

import torch
from torch import nn

from unisono.data.data_reading import Reading, is_stream, length_of
from unisono.data.epoch_order import EpochOrder, Sampler
from unisono.data.fingerprint import fingerprint_of_data
from unisono.engine.exchange.snapshots import RunMemory
from unisono.engine.state.optimizers import needs_closure
from unisono.engine.state.run_state import RunState
from unisono.engine.step.engine import StepEngine
from unisono.engine.step.loss_scaling import LossScaling
from unisono.errors import MismatchError
from unisono.plan.samples import ENDLESS, SamplePlan
from unisono.plan.shards import default_shards
from unisono.programs.kept import KeptProgram
from unisono.programs.live import variables_of
from unisono.runtime.device import Device
from unisono.runtime.notices import say
from unisono.runtime.whole import check_whole
from unisono.runtime.workers.replicated_calls import ReplicatedCalls
from unisono.runtime.workers.team import Team
from unisono.training.checkpoints import Checkpoints
from unisono.training.loop_plan import LoopPlan, Totals
from unisono.training.options import RunOptions


class Observer:
    """Follows a run; this one is for custom training loops and prints what is to be said."""

    runs_program_code = True
    own_callbacks: Mapping[str, Any] = MappingProxyType({})

    def say(self, line: str) -> None:
        """Show the user one line."""
        say(line)

    def begin(self) -> None:
        """Called on every worker in a loop, before its first step there."""

    def before_snapshot(self) -> None:
        """Called on every worker before the state of the run is copied."""

    def before_pause(self) -> None:
        """Called on every worker before all stop between two steps, maybe for good."""


@final
@dataclass(slots=True)
class RunContext:
    """One run, as its parts see it."""

    options: RunOptions  # what the program passed
    kept: RunState  # how far the run has come, and all that is saved with it
    team: Team  # the workers
    replicated_calls: ReplicatedCalls  # what they have done together
    scaling: Mapping[str, LossScaling]  # how losses are scaled, by the names of optimizers
    fixed: dict[str, Any]  # what fixes the run's bits, by name, beside samples and versions
    is_unseeded: bool  # random numbers were drawn without a seed before the run was made
    exchange: str  # the name of what sums gradients
    device: Device  # where this worker computes
    shards: int | None  # S; None before the first loop, if the program has left it out
    checkpoints: Checkpoints | None = None  # where they go; None: nowhere
    observer: Observer = field(default_factory=Observer)  # who follows the run now
    # computes a batch's loss; None in loops where the program does that
    loss: Callable[[nn.Module, Any], Any] | None = None
    frame: FrameType | None = None  # of the program's own loop, while it is under way
    functions: Sequence[Any] = ()  # what of the program runs in the loop's passes, as far as known
    engine: StepEngine | None = None  # computes the steps of the loop under way
    memory: RunMemory | None = None  # of the newest loop
    seen: tuple[int, dict[str, str]] | None = None  # of the data set of a loop, by its number
    plan: SamplePlan | None = None  # which samples the epoch under way has
    has_resumed: bool = False  # no checkpoint is to be looked for any more
    has_joined: bool = False  # see `unisono.Run`
    is_ahead: bool = False  # likewise
    program_kept: KeptProgram | None = None  # what the program changes between steps
    num_loops: int = 0  # that the program has come to
    loop: str = ""  # tells the newest of them apart when the program is started again
    goes_on: bool = False  # `unisono.Run.go_on` was called after the last stop
    are_mixed: bool | None = None  # whether devices compute other bits; None before the first loop
    loops_seen: frozenset[Any] = frozenset()  # the code of the program's own, and where in it
    told: set[str] = field(default_factory=set)  # what is said once in a run, and has been said

    @property
    def program(self) -> dict[str, Any]:
        """What of the program runs in a step, by name."""
        kept = self.kept
        return {
            "loss": self.functions,
            "loop": {} if self.frame is None else variables_of(self.frame),
            "model": kept.model,
            "optimizer": kept.optimizer,
            "on_gradients": self.options.on_gradients,
            "hooks": {
                name: [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
                for name, parameter in kept.model.named_parameters()
            },
        }

    def say(self, line: str) -> None:
        """Show the user one line."""
        self.observer.say(line)

    def say_once(self, line: str) -> None:
        """Show one line in the whole run, if this is the worker that speaks for all."""
        if line not in self.told:
            self.told.add(line)
            if self.team.position == 0 and not self.replicated_calls.is_behind:
                self.say(line)

    def has_begun(self) -> None:
        """Have the program go on from where it was, once a loop has begun on this worker."""
        drawn, passes = None, None if self.engine is None else self.engine.passes
        if self.program_kept is not None:
            is_alone = passes is None or self.has_joined or self.replicated_calls.is_behind
            drawn_now = list if passes is None else passes.drawn
            team = None if is_alone else self.team
            drawn = self.program_kept.has_begun(self.num_loops, drawn_now, team)
        if passes is not None:  # else others have done all steps of the loop
            passes.draw_on(drawn, self.kept.position.step)

    @property
    def takes_closure(self) -> bool:
        """Whether the optimizer is called with a closure."""
        return needs_closure(self.kept.optimizer)

    @property
    def is_deterministic(self) -> bool:
        """Whether torch is to choose deterministic kernels; on the CPU they are."""
        return self.options.exact and not self.device.is_host

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped where it stands."""
        stopped_at = self.kept.last.get("stopped_at")
        return isinstance(stopped_at, int) and self.kept.position.step >= stopped_at

    def plan_loop(self, reading: Reading, epochs: int | None, steps: int | None) -> LoopPlan:
        """Plan a loop over a dataset; raises as :func:`plan_samples` does."""
        seed = self.options.seed
        samples = plan_samples(reading, self.shards, seed, steps, may_be_endless=epochs is None)
        return LoopPlan(reading, samples, Totals(epochs, steps))

    def plan_pass(self, reading: Reading) -> SamplePlan:
        """Plan one pass without training; raises as :func:`plan_samples` does."""
        whole = plan_samples(reading, 1, self.options.seed)
        if whole.cuts is not None:
            check_covers(whole, length_of(reading.dataset))
        shards = self.options.shards or default_shards(whole.batch_size)
        batch_size = shards * whole.batch_size
        return replace(whole, batch_size=batch_size, shards=shards, in_blocks=True)

    def is_over(self, totals: Totals) -> bool:
        """Return whether the run goes no further."""
        return self.is_ahead or self.is_stopped or totals.are_reached(self.kept.position)


def plan_samples(
    reading: Reading,
    shards: int | None,
    seed: int,
    steps: int | None = None,
    *,
    may_be_endless: bool = False,
) -> SamplePlan:
    """Plan which samples are computed where; S may follow from the batch size.

    `steps`: how many are needed of a sampler that may have no end.
    """
    dataset, shuffle, sampler = reading.dataset, reading.shuffle, reading.sampler
    if reading.batch_sampler is not None:
        return _cut_plan(reading, reading.batch_sampler, shards, seed, steps)
    batch_size, groups = check_whole("batch_size", reading.batch_size, at_least=1), reading.groups
    shards = default_shards(batch_size) if shards is None else shards
    length = length_of(dataset)
    if length == ENDLESS and not may_be_endless:
        raise TypeError(
            f"the dataset must have a length where epochs are counted or every sample is to come "
            f"once, but {type(dataset).__name__} is an IterableDataset without `__len__`: train "
            f"with `steps=` alone, give it a `__len__` that says how many samples it gives each "
            f"time, or read it into a list."
        )
    if is_stream(dataset):
        if sampler is not None or shuffle:
            given = "`shuffle`" if sampler is None else "`sampler`"
            raise ValueError(
                f"{given} must be left out for an IterableDataset, which has an order of its own, "
                f"but is given: let {type(dataset).__name__} shuffle, or give it `__getitem__`."
            )
        shuffle = False
    if sampler is None or not length:
        shuffle = shuffle is None or bool(shuffle)
        return SamplePlan(length, batch_size, shards, shuffle, seed, groups=groups)
    if shuffle:
        raise ValueError(
            "`shuffle` must be left out where a `sampler` says the order, but is "
            f"{shuffle!r}: let the sampler shuffle."
        )
    needed = None if steps is None else steps * batch_size
    order = sampler
    if not isinstance(order, EpochOrder):
        order = EpochOrder(sampler, seed, length, needed=needed)
    num_samples = ENDLESS if order.is_endless else order.num_samples
    return SamplePlan(
        num_samples, batch_size, shards, False, seed, order.name, order, groups=groups
    )


def _cut_plan(
    reading: Reading, batch_sampler: Sampler, shards: int | None, seed: int, steps: int | None
) -> SamplePlan:
    """Plan the batches that a batch sampler cuts."""
    length = length_of(reading.dataset)
    if is_stream(reading.dataset) or not length:
        raise ValueError(
            "a `batch_sampler` must be left out where samples have no numbers, as those of an "
            "IterableDataset, or where there are none: let the dataset yield whole batches, or "
            "give it `__getitem__` and `__len__`."
        )
    order = EpochOrder(batch_sampler, seed, length, in_batches=True, needed=steps)
    starts = order.starts(0)
    # As many samples as the dataset has are read in any case.
    most = starts[: int((starts <= max(length, int(starts[1]))).sum())]
    mean_size = int(most[-1]) // (len(most) - 1)
    return SamplePlan(
        ENDLESS if order.is_endless else order.num_samples,
        mean_size,
        default_shards(mean_size) if shards is None else shards,
        False,
        seed,
        order.name,
        order,
        groups=reading.groups,
        cuts=order,
        starts=starts,
    )


def check_covers(plan: SamplePlan, length: int) -> None:
    """Refuse batches of an evaluation that leave samples out, or take some twice."""
    order = plan.order(0)
    assert order is not None
    counts = torch.bincount(order.clamp(max=length), minlength=length)
    wrong = torch.where(counts[:length] != 1)[0]
    if len(wrong) or len(counts) > length:
        where = f"takes sample {int(wrong[0])} {int(counts[wrong[0]])} times"
        raise ValueError(
            f"evaluation must go over every sample of a dataset once, by its number, but the "
            f"batch sampler {plan.sampler} {where}: let it give each once, or pass the samples "
            f"that are meant with `torch.utils.data.Subset`."
        )


def no_epochs(name: str) -> ValueError:
    """Refuse an interval in epochs for a stream that does not say how many samples it has."""
    return ValueError(
        f"`{name}` must be in steps where the dataset has no length, as then no epoch ends, but is "
        f"in epochs: count steps, or give the dataset a `__len__`."
    )


def samples_seen(run: RunContext, plan: LoopPlan) -> dict[str, str]:
    """Look at a few samples of the loop's data set, before anything is put back; once a loop."""
    if run.seen is None or run.seen[0] != run.num_loops:
        run.seen = run.num_loops, samples_now(plan)
    return run.seen[1]


def samples_now(plan: LoopPlan) -> dict[str, str]:
    """Look at a few samples of the loop's data set, as epoch 0 has them."""
    reading = plan.reading
    return fingerprint_of_data(
        reading.dataset,
        length_of(reading.dataset),
        seed=plan.samples.seed,
        stream="train",
        epoch=0,
        in_fork=reading.loader_workers > 0,
    )


def facts_of_order(samples: SamplePlan, epoch: int) -> dict[str, str]:
    """Return what tells the order that a sampler gives for an epoch from others; empty without one.

    One without an end was read as far as the call needs it, and another call reads more or less:
    beginnings of it are told.
    """
    if samples.sampler is None:
        return {}
    whole = f"the sampler's order of epoch {epoch}"
    if not samples.is_endless:
        return {whole: samples.digest(epoch)}
    order = samples.order(epoch)
    assert order is not None
    sizes = itertools.takewhile(
        len(order).__ge__, (samples.batch_size << power for power in itertools.count())
    )
    return {f"the first {size} of {whole}": samples.digest(epoch, size) for size in sizes}


def check_order(run: RunContext, samples: SamplePlan) -> None:
    """Refuse to go on in the midst of an epoch in another order than it has begun in."""
    position = run.kept.position
    order, begun = facts_of_order(samples, position.epoch), run.kept.last.get("order", {})
    if position.batch and any(begun.get(name, told) != told for name, told in order.items()):
        raise MismatchError(
            f"`sampler` must give the order again in which epoch {position.epoch} has begun, but "
            f"{samples.sampler} gives another: give it what it was given, or begin anew with "
            f'`Checkpoint(resume="never")`.'
        )
    order_of, goes_on = samples.order_of, position.batch and not run.has_joined
    if goes_on and isinstance(order_of, EpochOrder) and order_of.has_changed(position.epoch):
        run.say_once(
            f"{samples.sampler} would give another order now than the one in which epoch "
            f"{position.epoch} has begun: this epoch goes on as it began, and what the sampler "
            f"gives counts from the next one on"
        )


def begin_epoch(run: RunContext, samples: SamplePlan, *, is_agreed: bool) -> None:
    """Begin the epoch of the next step. Collective, unless its order is agreed on."""
    order = facts_of_order(samples, run.kept.position.epoch)
    if order:
        if not is_agreed:
            run.team.agree(order, "order of an epoch")
        run.kept.last["order"] = order

"""The step loop: every global batch once, for custom training loops.

::

    run = unisono.Run(model, optimizer, shards=8, seed=0, directory="runs/mine")
    for step in run.steps(train_set, batch_size=64, epochs=3):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.data.collating import Collate
from unisono.data.data_reading import Reading
from unisono.data.epoch_order import Sampler
from unisono.data.fingerprint import Fingerprints
from unisono.device import AUTO, drawn_without_seed
from unisono.exchange.carried_states import CarriedStates
from unisono.exchange.choice import name_of_exchange
from unisono.exchange.link_state import SLOW_LINK_KEY, LinkState
from unisono.exchange.slow_link import SlowLink
from unisono.plan.samples import SamplePlan
from unisono.stages.stage_worker import BY_MEMORY, Balance
from unisono.state.contents import check_contents
from unisono.state.digest import digest_of
from unisono.state.position import Position
from unisono.state.program_state import ExtraState
from unisono.state.run_state import RunState
from unisono.state.several_optimizers import members_of
from unisono.step.gradient_hook import OnGradients
from unisono.step.scaling import LossScaling
from unisono.train.carrying import check_rows
from unisono.train.checkpoints import Checkpoints
from unisono.train.failure_notes import failure_notes
from unisono.train.host_checks import check_hosts
from unisono.train.identity import fixed_by
from unisono.train.loop import steps_of
from unisono.train.loop_plan import LoopPlan
from unisono.train.order import no_epochs, plan_samples
from unisono.train.out_of_memory import explained, memory_explained
from unisono.train.run_context import Observer, RunContext
from unisono.train.run_options import RunOptions
from unisono.train.several_models import Models, Optimizers, check_together, joined
from unisono.train.slow_link_checks import check_run, link_among
from unisono.train.split_model import check_split_before, devices_of_run, place_on
from unisono.train.stage_checks import check_stages
from unisono.train.start import start
from unisono.train.step import Step
from unisono.train.totals import Totals
from unisono.workers.context import context
from unisono.workers.launcher_messages import Ready

SCALER_KEY = "grad_scaler"
EXTRA_STATE_KEY = "extra_state"
CARRIED_KEY = "carried"


class Run:
    """A training run: the same result on any number of workers. Final.

    Making one is cheap and touches neither model nor optimizer, but for moving them to the device.
    While :meth:`steps` is under way
    the parameters lie in memory shared by all workers; before and after, each worker's model is
    its own. When it begins, everybody takes the values of the leader, which is rank 0 unless that
    was lost.

    A worker that is killed costs nothing: the others compute its shards. If it is killed in the
    midst of an update, the run goes back to its latest snapshot, so that some steps come again; the
    block of the one under way then ends with ``step.is_done`` False.

    Under another launcher (``torchrun``, Slurm's ``srun``, Open MPI's ``mpirun``; one host) the
    bits are the same, but nobody makes up for a worker that is lost: the others raise
    :class:`unisono.PeerLostError`, and the run goes on from its `directory` when it is started
    again. There every rank has to make its first run, which waits for all of them.

    Args:
        model: on the CPU, or on the device where it is to be computed; or several, by name. Then
            ``run.model["generator"]`` is one of them.
        optimizer: over the model's parameters; or several, by name, each over parameters of its
            own. ``with step:`` computes one loss and steps all of them;
            ``with step.update("generator"):`` within it is for one.
        shards: S, the fixed number of parts of every global batch; at least the number of
            workers. None: the number of cores, at most 8, or the number of workers if larger.
        seed: of the order of samples and of all random numbers in training; ≥ 0, < 2⁶⁴. Weights
            are drawn before: call ``torch.manual_seed`` before the model is made.
        directory: where checkpoints are kept; None: nowhere. Where workers name different ones, as
            with a time in the name, all take rank 0's at the first loop.
        checkpoint_every: the interval, such as ``500`` (steps), ``"1 epoch"`` or ``"10min"``;
            with a directory there is always one when a loop ends.
        keep: how many checkpoints stay.
        resume: ``"auto"``: the first loop goes on from the newest checkpoint that is whole;
            ``"never"``: it begins anew.
        resume_options: where the program gives other options of the optimizer or of a schedule than
            when the run began, or has other parameters fixed (it is told which): ``"checkpoint"``:
            those that the run began with stay; ``"program"``: the new ones are taken, and a
            schedule has the rates of one that was given them at the start.
        clip_norm: what the norm of the mean gradients is scaled down to where it is larger, with
            the bits of torch's ``clip_grad_norm_`` over what the optimizer updates, in the model's
            order; ``math.inf`` only has it found, for ``step.gradient_norm`` and the event file.
            Several optimizers are clipped each on its own, by one value or by those of a dict with
            their names; so it is with `clip_value` and `grad_scaler`.
        clip_value: what the magnitude of each element of the mean gradients is clamped to.
        grad_scaler: for passes in float16: `Step.backward` scales the loss, gradients are unscaled
            before they are clipped, and a step in which they are not finite is skipped, on all
            workers alike, with torch's bits. Its state is the run's, as ``run.state`` is.
        device: where each worker computes: ``"auto"``: one GPU for each, or the CPU where there is
            none; or torch's name, such as ``"cpu"`` or ``"cuda"`` (``"cuda:1"``: for all workers
            the same one). The model is moved there, here and now; batches come there. A model that
            :func:`unisono.split` has put on several devices is computed there: leave this out.
        devices: several for each worker, instead of one `device`, which compute the worker's shards
            at the same time, each with a copy of the model; results do not depend on it. Either all
            have numbers (``["cuda:0", "cuda:1"]``: the same for all workers), or none (``["cuda"] *
            2``: each worker has two of its own); ``["cpu"] * 2`` computes one after the other. The
            first one has the model. In the loop's body compute with ``step.model``.
        exchange: how gradients become one sum; results do not depend on it. ``"auto"``: the first
            of these on CPUs, the second elsewhere, or what the variable UNISONO_EXCHANGE names.
            ``"shared"``: workers on CPUs look at one copy of the parameters. ``"staged"``: each
            has a replica, and gradients travel through the host's memory. ``"nccl"``, ``"gloo"``:
            they travel through a process group, on GPUs or on CPUs; never run on GPUs.
        exact: whether results have the same bits in every run on an accelerator: torch chooses
            deterministic kernels while this computes, its switches are put back after, and an
            operation that has none raises :class:`unisono.NondeterministicError`. False: torch's
            switches stay as the program has them. On the CPU it changes nothing.
        balance: with ``--stages``, which layers are on which stage: ``"memory"``: the largest stage
            is as small as it can be; or by the number of each stage the names of its layers, such
            as ``{0: ["embed", "blocks.0"], 1: ["blocks.1", "head"]}``. It changes no bit.
        shards_in_flight: with ``--stages``, how many shards may be under way at once; None: as many
            as there are stages. It changes no bit.
        audit_every: every so many steps, each worker computes the shards of another again, and
            replicas are compared, so that bits which memory or a processor got wrong are found: the
            worker is named and replaced, and the run goes back to where all was right. None: never.
            A line says once with which interval this takes at most 1 % of the time.
        on_gradients: called once a step with (step, mean gradients by name), before they are
            clipped: changes them in place, or returns others by name. It is called on every worker
            with the same bits, and must do the same on each; generators are seeded for it.
        closure: whether the optimizer's ``step`` is called with a closure, which computes all
            shards again with the parameters as they are then, with the same random numbers. None:
            if it cannot be called without one, as LBFGS'.
        carry: whether each shard hands something on from batch to batch, such as the hidden state
            of a recurrent network: ``step.carried``. It is kept with the run, and begins anew with
            each epoch. Samples must come in an order in which each row of a batch continues that
            row of the batch before, see ``unisono.data.continuing_rows``.
        slow_link: how less is sent between hosts: ``unisono.Bf16Gradients()``. It changes the
            result, which is the same for any number of workers. None: all is exact.

    Attributes:
        shards: S.
        device: where this worker computes; of several devices the first.
        has_joined: whether this worker has joined the newest loop under way, in the place of one
            that was lost.
        is_ahead: whether the run goes on from a checkpoint of a later loop than the newest one,
            which has had nothing to do.
        fixed: what else fixes the run's bits, by name, as plain JSON: it is compared between
            workers and with checkpoints. A program may add to it before the first loop.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument does not fit; the message says what to do.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        shards: int | None = None,
        seed: int = 0,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_every: int | str | None = None,
        keep: int = 3,
        resume: str = "auto",
        resume_options: str = "checkpoint",
        clip_norm: float | Mapping[str, float] | None = None,
        clip_value: float | Mapping[str, float] | None = None,
        grad_scaler: torch.amp.GradScaler | Mapping[str, torch.amp.GradScaler] | None = None,
        device: str | torch.device = AUTO,
        devices: Sequence[str | torch.device] | None = None,
        exchange: str = AUTO,
        exact: bool = True,
        balance: Balance = BY_MEMORY,
        shards_in_flight: int | None = None,
        audit_every: int | None = None,
        on_gradients: OnGradients | None = None,
        closure: bool | None = None,
        carry: bool = False,
        slow_link: SlowLink | None = None,
    ) -> None:
        self._set_up(model, optimizer, RunOptions.among(locals()))

    @classmethod
    def of(cls, model: Models, optimizer: Optimizers, options: RunOptions) -> Run:
        """Make a run of its options, which are the arguments of the same names."""
        run = cls.__new__(cls)
        run._set_up(model, optimizer, options)
        return run

    def _set_up(self, models: Models, optimizers: Optimizers, options: RunOptions) -> None:
        model, optimizer = joined(models, optimizers)
        self.joint_calls = context().join()
        self.team = self.joint_calls.team
        self.world = self.team.world
        self.shards = options.num_shards(self.world.world_size, self.team.num_stages)
        self.seed = options.seed
        self.device, *others = devices_of_run(model, options, self.world)
        check_hosts(self.team, options)
        check_stages(self.team, model, self.device, options, 1 + len(others))
        check_contents(model, optimizer, self.device)
        check_together(optimizer, options, self.team.num_stages)
        options.check_closure(optimizer)
        # Refuses what does not fit.
        replicas_for = options.replicas_for(optimizer)
        num_hosts = len(self.team.hosts)
        name_of_exchange(
            options.exchange, self.device, replicas_for=replicas_for, num_hosts=num_hosts
        )
        options.check_audits(self.device)
        link = link_among(self.team, options, self.shards)
        if link is not None:
            check_run(link, options, model, optimizer, self.team, self.device)
        scaling: dict[str, LossScaling] = {}
        for name, member in members_of(optimizer).items():
            options.clipping_of(name).check_fits(member)
            if (scaled := LossScaling.of(options.scaler_of(name), member)) is not None:
                scaling[name] = scaled
        self.model, self.optimizer = model, optimizer
        is_unseeded = drawn_without_seed()
        if options.exact:
            self.device.fix_workspaces()
        fixed = {
            "clip_norm": options.clip_norm,
            "clip_value": options.clip_value,
            **fixed_by(model, optimizer),
            "grad_scaler": _rules(scaling),
        }
        if not self.device.is_host:
            fixed["exact"] = options.exact
        if options.on_gradients is not None:
            fixed["on_gradients"] = getattr(
                options.on_gradients, "__qualname__", type(options.on_gradients).__qualname__
            )
        if options.takes_closure(optimizer):
            fixed["closure"] = True
        if options.carry:
            fixed["carry"] = True
        fixed[SLOW_LINK_KEY] = None if link is None else repr(link)
        self._context = RunContext(
            options,
            RunState(model, optimizer, options.resume_options),
            self.team,
            self.joint_calls,
            scaling,
            fixed,
            is_unseeded,
            self.device,
            others,
        )
        with memory_explained(self._context, "move of the model"):
            place_on(model, optimizer, self.device)
        for name in scaling:
            key = SCALER_KEY
            if isinstance(options.grad_scaler, Mapping):
                key = f"{SCALER_KEY}.{name}"
            self.state[key] = options.scaler_of(name)
        if options.carry:
            self._context.carried = self.state[CARRIED_KEY] = CarriedStates(self.shards)
        if link is not None:
            self._context.link = self.state[SLOW_LINK_KEY] = LinkState(link)
        extra_state = ExtraState(model)
        if not extra_state.is_empty:
            self.state[EXTRA_STATE_KEY] = extra_state
        self.checkpoints: Checkpoints | None = None
        if options.directory is not None:
            failure_notes()
            self.checkpoints = Checkpoints(self.team, Path(options.directory), options, self.say)
            self._context.checkpoints = self.checkpoints
        self.team.supervisor.tell(Ready())
        names = dict.fromkeys(device.name for device in (self.device, *others))
        context().tell_device(" + ".join(names), self.device.model)

    @property
    def position(self) -> Position:
        """How far the run has come."""
        return self._context.kept.position

    @property
    def state(self) -> dict[str, Any]:
        """What the program saves with the run: plain JSON, tensors, or objects with states.

        Objects have ``state_dict`` and ``load_state_dict``, as a schedule of learning rates has.
        Put them in before the first loop; all is as it was in checkpoints, in replacements of lost
        workers, and in steps that come again. What modules give in torch's `get_extra_state` is
        there already.
        """
        return self._context.kept.state

    @property
    def last(self) -> dict[str, Any]:
        """What the last step said (``"means"``), and what else the trainer notes; plain JSON."""
        return self._context.kept.last

    @property
    def fixed(self) -> dict[str, Any]:
        """What else fixes the run's bits, by name, as plain JSON."""
        return self._context.fixed

    @property
    def fingerprints(self) -> Fingerprints:
        """Those of the data sets that the workers have compared."""
        return self._context.fingerprints

    @property
    def is_deterministic(self) -> bool:
        """Whether torch chooses deterministic kernels while this computes; on the CPU they are."""
        return self._context.is_deterministic

    @property
    def has_joined(self) -> bool:
        """Whether this worker has joined the newest loop as a replacement of a lost one."""
        return self._context.has_joined

    @property
    def is_ahead(self) -> bool:
        """Whether the checkpoint that the run resumes from is past this loop, now a no-op."""
        return self._context.is_ahead

    def steps(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool | None = None,
        sampler: Sampler | None = None,
        loader_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
    ) -> Generator[Step, None, None]:
        """Yield steps until the totals are reached; a finished run yields none.

        Collective: every rank calls it and uses every step, in the same order.

        Args:
            dataset: map-style, or an IterableDataset, which every worker reads whole from its
                start, if it has no method ``shard(index, num_shards)`` that gives one shard's part;
                the same on every worker. Without a length it has one epoch, and `steps` says when
                the run ends. Or a DataLoader of torch, from which
                its dataset, order and `collate_fn`, its batch size (as that of a global batch) and
                its number of processes are taken.
            batch_size: samples of one global batch, all workers together; None: the loader's.
            epochs: how many epochs the run has in total.
            steps: how many steps the run has in total; with `epochs`, whichever comes first.
            shuffle: whether each epoch has an order of its own; None: it has, if no sampler is
                given.
            sampler: says the order: takes (epoch, seed) to indices, in each epoch equally many,
                some maybe several times; the same on every worker. Or one of torch's samplers.
            loader_workers: processes of each worker that read ahead while steps are computed;
                0: the worker reads for itself. Bits do not depend on it.
            collate_fn: makes a batch of a list of samples; None: torch's ``default_collate``.
            pin_memory: with ``device="cpu"``, give batches out in pinned memory where there is a
                GPU, for programs that copy them there. On an accelerator batches come to the
                device by way of pinned memory in any case.

        Raises:
            TypeError: the dataset has no samples or no length, or a number is not whole.
            ValueError: a number does not fit.
            MismatchError: the workers do not agree.
            CheckpointError: the newest checkpoint belongs to another run.
        """
        reading = Reading.of(
            dataset,
            batch_size,
            shuffle=shuffle,
            sampler=sampler,
            loader_workers=loader_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )
        samples = self.plan(reading, may_be_endless=epochs is None)
        return self.begin_loop(LoopPlan.of(reading, samples, Totals(epochs, steps)))

    def begin_loop(
        self,
        plan: LoopPlan,
        observer: Observer | None = None,
        loss: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Generator[Step, None, None]:
        """Begin a loop; see :meth:`steps`.

        Args:
            plan: what it goes over.
            observer: follows the run from here on; None: whoever did before.
            loss: takes (model, batch) to a loss, to look for what is not finite; None: not known.
        """
        every = self._context.options.every
        if plan.samples.is_endless and every is not None and every.epochs is not None:
            raise no_epochs("checkpoint_every")
        self._context.loss = loss
        if observer is not None:
            self._context.observer = observer
        check_split_before(self.model, self.device)
        if not self.device.is_host:
            # Since the run was made the program may have moved it, or added layers and groups.
            check_contents(self.model, self.optimizer, self.device)
            place_on(self.model, self.optimizer, self.device)
        start(self._context, plan)
        return steps_of(self._context, plan, plan.fetch())

    def stop(self) -> None:
        """End the loop under way after the step under way, as if that were its last.

        Collective: every rank calls it, at the same step. The run has ended then: `steps` gives
        nothing more, also after a restart from its checkpoint, until :meth:`go_on` is called.
        """
        self.last["stopped_at"] = self.position.step
        self._context.goes_on = False

    def go_on(self) -> None:
        """Undo `stop`, now or from before the program was started again. Collective."""
        self.last.pop("stopped_at", None)
        self._context.goes_on = True

    def digest(self) -> str:
        """Hash parameters, buffers and optimizer state; equal digests mean equal runs.

        Collective: every rank calls it and gets rank 0's.

        Returns:
            64 hexadecimal digits.
        """

        def speak() -> bytes:
            return digest_of(self.model, self.optimizer).encode()

        return self.joint_calls.hear_leader(speak, "digest").decode()

    def plan(self, reading: Reading, *, may_be_endless: bool = False) -> SamplePlan:
        """Plan which samples are computed where; raises as :meth:`steps` does."""
        samples = plan_samples(
            reading.dataset,
            reading.batch_size,
            reading.shuffle,
            reading.sampler,
            shards=self.shards,
            seed=self.seed,
            may_be_endless=may_be_endless,
        )
        if self.carried is not None:
            check_rows(samples)
        return samples

    @property
    def carried(self) -> CarriedStates | None:
        """What shards hand from batch to batch; None: nothing."""
        return self._context.carried

    def explained(self, error: Exception, phase: str, batch_size: int) -> Exception:
        """Explain what a pass over batches of this size has raised, if memory is full."""
        return explained(error, self._context, phase, batch_size=batch_size)

    def say(self, line: str) -> None:
        """Show the user one line, where whoever follows the run shows them."""
        self._context.say(line)


def _rules(scaling: Mapping[str, LossScaling]) -> Any:
    """Say how losses are scaled: by optimizer, where there are several."""
    rules = {name: each.rule for name, each in scaling.items()}
    return rules.get("", rules) or None

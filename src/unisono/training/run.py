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
import sys
from collections.abc import Generator, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.data.data_reading import Reading
from unisono.data.epoch_order import Sampler
from unisono.engine.exchange.choice import name_of_exchange
from unisono.engine.state.contents import check_contents, digest_of
from unisono.engine.state.optimizers import needs_closure, optimizers_of
from unisono.engine.state.packing import ExtraState
from unisono.engine.state.run_state import Position, RunState
from unisono.engine.step.combined_buffers import ways_of
from unisono.engine.step.loss_scaling import LossScaling
from unisono.engine.step.transforms import OnGradients
from unisono.plan.shards import assign
from unisono.runtime.device import AUTO, drawn_without_seed
from unisono.runtime.habits import attributes_met, habits_met
from unisono.runtime.workers.context import context
from unisono.runtime.workers.launcher_messages import Ready
from unisono.training.checkpoints import Checkpoints
from unisono.training.identity import fixed_by
from unisono.training.loop import begin_loop
from unisono.training.model_placement import device_of_run, place_on
from unisono.training.options import (
    OF_PROGRAM,
    THINGS,
    Checkpoint,
    RunOptions,
    Scaler,
    check_together,
)
from unisono.training.out_of_memory import memory_explained
from unisono.training.run_context import RunContext
from unisono.training.several_models import Models, Optimizers, check_names, joined
from unisono.training.step import Step

SCALER_KEY = "grad_scaler"
EXTRA_STATE_KEY = "extra_state"


@final
@attributes_met("`Run`")
class Run:
    """A training run with a custom loop: the same result on any number of workers.

    When a loop begins, all workers take the values of the leader, which is rank 0 unless it was
    lost. If a worker is killed, the others compute its shards. If it is killed during an update,
    the run returns to its newest snapshot and repeats some steps; the block of the current step
    then ends with ``step.is_done`` False. Under another launcher, such as ``torchrun``, the others
    raise :class:`unisono.errors.PeerLostError`, and the run resumes from its `directory` when it is
    started again.

    Arguments that are not listed are those of :class:`unisono.Trainer`. Several optimizers are
    clipped separately, by one value or by a dict of values by name. For a lower precision, compute
    the loss under ``torch.autocast``, as in any loop.

    Args:
        model: the model, on any device; or several, by name, which are then
            ``run.model["generator"]`` and so on.
        optimizer: over the model's parameters; or several, by name, each over its own parameters.
            ``with step:`` computes one loss and steps all of them;
            ``with step.update("generator"):`` within it is for one.
        exact: see :class:`unisono.Precision`.
        scaler: for float16: `Step.backward` scales the loss, gradients are unscaled before
            they are clipped, and a step whose gradients are not finite is skipped on all workers,
            with torch's bits. Its state is saved with the run. Several optimizers may have one
            each, in a dict by name.

    Attributes:
        device: where this worker computes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is not valid; the message says what to do.
    """

    @habits_met("Run(model, optimizer, shards=4)")
    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        shards: int | None = None,
        seed: int = 0,
        device: str | torch.device = AUTO,
        exact: bool = True,
        scaler: Scaler | Mapping[str, Scaler] | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
        clip_value: float | Mapping[str, float] | None = None,
        on_gradients: OnGradients | None = None,
        buffers: Mapping[str, str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        checkpoint: int | str | Checkpoint | None = None,
    ) -> None:
        options = RunOptions(
            shards=shards,
            seed=seed,
            device=device,
            exact=exact,
            scaler=scaler,
            clip_norm=clip_norm,
            clip_value=clip_value,
            on_gradients=on_gradients,
            buffers=buffers,
            directory=directory,
            checkpoint=checkpoint,
        )
        model, optimizer = joined(model, optimizer)
        context().supervisor.notify(Ready())  # workers killed from now on are replaced
        replicated_calls = context().join()
        team = replicated_calls.team
        if options.shards is not None:
            assign(options.shards, team.world.world_size)  # raises if there are too few
        self.device = device_of_run(model, options, team.world)
        check_contents(model, optimizer, self.device)
        check_names(optimizer, options)
        has_closure = needs_closure(optimizer)
        check_together(
            buffers=bool(options.buffers),
            closure=has_closure,
            scaler=options.scaler is not None,
            several=len(optimizers_of(optimizer)) > 1,
        )
        replicas_for = THINGS["closure"] if has_closure else ""
        if options.on_gradients is not None:
            replicas_for = "`on_gradients`"
        exchange = name_of_exchange(self.device, replicas_for=replicas_for)
        scaling: dict[str, LossScaling] = {}
        for name, single in optimizers_of(optimizer).items():
            options.clipping_of(name).check_fits(single)
            if (scaled := LossScaling.of(options.scaler_of(name), single)) is not None:
                scaling[name] = scaled
        is_unseeded = drawn_without_seed()
        if options.exact:
            self.device.fix_workspaces()
        rules = {name: each.rule for name, each in scaling.items()}
        fixed = {
            "clip_norm": options.clip_norm,
            "clip_value": options.clip_value,
            **fixed_by(model, optimizer),
            "grad_scaler": rules.get("", rules) or None,  # by optimizer, if there are several
        }
        if not self.device.is_host:
            fixed["exact"] = options.exact
        if options.on_gradients is not None:
            fixed["on_gradients"] = getattr(
                options.on_gradients, "__qualname__", type(options.on_gradients).__qualname__
            )
        if has_closure:
            fixed["closure"] = True
        if ways := ways_of(model, options.buffers):
            fixed["buffers"] = ways
        self._context = RunContext(
            options,
            RunState(model, optimizer, takes_programs=options.saving.options == OF_PROGRAM),
            team,
            replicated_calls,
            scaling,
            fixed,
            is_unseeded,
            exchange,
            self.device,
            options.shards,
        )
        with memory_explained(self._context, "move of the model"):
            place_on(model, optimizer, self.device)
        for name in scaling:
            key = SCALER_KEY
            if isinstance(options.scaler, Mapping):
                key = f"{SCALER_KEY}.{name}"
            self.state[key] = options.scaler_of(name)
        extra_state = ExtraState(model)
        if not extra_state.is_empty:
            self.state[EXTRA_STATE_KEY] = extra_state
        if options.directory is not None:
            given, say = options.directory, self._context.say
            self._context.checkpoints = Checkpoints(team, given, options.saving, say)

    @property
    def shards(self) -> int | None:
        """S, the number of parts of every global batch; None before the first loop, if left out."""
        return self._context.shards

    @property
    def model(self) -> nn.Module:
        """The model. For another model, create another run."""
        return self._context.kept.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. For another optimizer, create another run."""
        return self._context.kept.optimizer

    @property
    def position(self) -> Position:
        """How far the run has come: step, epoch and batch."""
        return self._context.kept.position

    @property
    def state(self) -> dict[str, Any]:
        """What your program saves with the run: plain JSON, tensors, or objects with a state.

        Objects must have ``state_dict`` and ``load_state_dict``, as learning rate schedules do. Add
        them before the first loop. The state is restored from checkpoints, in replacements of lost
        workers, and in repeated steps. The modules' `get_extra_state` is saved automatically.
        """
        return self._context.kept.state

    @property
    def last(self) -> dict[str, Any]:
        """The results of the last step (``"means"``), and notes of the trainer; plain JSON."""
        return self._context.kept.last

    @property
    def fixed(self) -> dict[str, Any]:
        """What else determines the run's bits, by name, as plain JSON.

        It is compared between workers and with checkpoints. Add to it before the first loop.
        """
        return self._context.fixed

    @property
    def has_joined(self) -> bool:
        """Whether this worker joined the newest loop as a replacement, or together with one."""
        return self._context.has_joined

    @property
    def is_ahead(self) -> bool:
        """Whether the checkpoint that the run resumes from is past this loop, now a no-op."""
        return self._context.is_ahead

    @habits_met("steps(train_set, batch_size=64, epochs=3)")
    def steps(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool | None = None,
        sampler: Sampler | None = None,
        drop_last: bool = False,
        batch_sampler: Sampler | None = None,
        groups: int = 1,
    ) -> Generator[Step, None, None]:
        """Yield steps until the totals are reached; a finished run yields none.

        Collective: every rank calls it and uses every step, in the same order. The arguments are
        those of :meth:`unisono.Trainer.fit`.

        Raises:
            TypeError: the dataset has no samples or no length, or a number is not an integer.
            ValueError: a number is not valid.
            MismatchError: the workers do not agree.
            CheckpointError: the newest checkpoint belongs to another run.
        """
        reading = Reading.of(
            dataset,
            batch_size,
            shuffle,
            sampler,
            drop_last=drop_last,
            batch_sampler=batch_sampler,
            groups=groups,
        )
        plan = self._context.plan_loop(reading, epochs, steps)
        return begin_loop(self._context, plan, frame=sys._getframe(2))

    def stop(self) -> None:
        """End the current loop after the current step, as if that were its last.

        Collective: every rank calls it, in the same step. The run is then over: `steps` yields
        nothing more, even after a restart from its checkpoint, until :meth:`go_on` is called.
        """
        self.last["stopped_at"] = self.position.step
        self._context.goes_on = False

    def go_on(self) -> None:
        """Undo `stop`, including one from before a restart of the program. Collective."""
        self.last.pop("stopped_at", None)
        self._context.goes_on = True

    def digest(self) -> str:
        """Return a hash of parameters, buffers and optimizer state; equal hashes mean equal bits.

        Any rank may call it, alone or with others. It is collective only in a loop in which one
        worker runs the optimizer for all (it is not element-wise, and workers share parameters).

        Returns:
            64 hexadecimal digits.
        """

        def speak() -> bytes:
            return digest_of(self.model, self.optimizer).encode()

        exchange = None if self._context.engine is None else self._context.engine.exchange
        if exchange is not None:
            exchange.references.take()
        if exchange is None or exchange.have_all:
            return speak().decode()
        return self._context.replicated_calls.broadcast_from_leader(speak, "digest").decode()


def context_of(run: Run) -> RunContext:
    """Return what the parts of a run share."""
    return run._context

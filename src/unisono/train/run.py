"""The step loop: every global batch once, for people with a loop of their own.

::

    run = unisono.Run(model, optimizer, shards=8, seed=0, directory="runs/mine")
    for step in run.steps(train_set, batch_size=64, epochs=3):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.data.collating import Collate
from unisono.data.epoch_order import Sampler
from unisono.data.fetch import fetcher
from unisono.data.fingerprint import REMEDY, Fingerprints
from unisono.data.length import length_of
from unisono.data.loader import Loader
from unisono.device import drawn_without_seed, notices
from unisono.exchange.choice import chosen
from unisono.exchange.run_memory import RunMemory
from unisono.notices import say
from unisono.plan.samples import NUM_SEEDS, SamplePlan
from unisono.plan.shards import assign
from unisono.state.contents import check_contents, signature
from unisono.state.modes import told_modes
from unisono.state.position import Position
from unisono.state.program_state import ExtraState
from unisono.state.run_state import RunState
from unisono.step.clipping import Clipping
from unisono.step.engine import StepEngine
from unisono.step.scaling import LossScaling
from unisono.train.alternation import open_loop
from unisono.train.checkpoints import Checkpoints, fixed_by, identity
from unisono.train.loop import Loop, loop
from unisono.train.order import SamplerOrder, plan_samples
from unisono.train.resume import Resumption, take_up
from unisono.train.step import Step
from unisono.train.totals import Totals
from unisono.whole import check_whole
from unisono.workers.context import context
from unisono.workers.launcher_messages import Live, Passed, Ready
from unisono.world import num_devices, threads_per_worker

SCALER_KEY = "grad_scaler"
EXTRA_STATE_KEY = "extra_state"


class Run:
    """A training run: the same result on any number of workers. Final.

    Making one is cheap and touches neither model nor optimizer. While :meth:`steps` is under way
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
        model: on the CPU.
        optimizer: over the model's parameters.
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
        clip_value: what the magnitude of each element of the mean gradients is clamped to.
        grad_scaler: for passes in float16: `Step.backward` scales the loss, gradients are unscaled
            before they are clipped, and a step in which they are not finite is skipped, on all
            workers alike, with torch's bits. Its state is the run's, as ``run.state`` is.

    Attributes:
        shards: S.
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
        model: nn.Module,
        optimizer: Optimizer,
        *,
        shards: int | None = None,
        seed: int = 0,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_every: int | str | None = None,
        keep: int = 3,
        resume: str = "auto",
        resume_options: str = "checkpoint",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._clipping = Clipping(clip_norm, clip_value)
        self.fixed: dict[str, Any] = {"clip_norm": clip_norm, "clip_value": clip_value}
        self.joint_calls = context().join()
        self.team = self.joint_calls.team
        self.world = self.team.world
        if shards is None:
            shards = max(num_devices(), self.world.world_size)
        shards = check_whole("shards", shards, at_least=1)
        seed = check_whole("seed", seed, at_least=0, below=NUM_SEEDS)
        assign(shards, self.world.world_size)
        check_contents(model, optimizer)
        self._clipping.check_fits(optimizer)
        self.fixed.update(fixed_by(model, optimizer))
        self._scaling = LossScaling.of(grad_scaler, optimizer)
        self.fixed["grad_scaler"] = None if self._scaling is None else self._scaling.rule
        if directory is None and checkpoint_every is not None:
            raise ValueError(
                "`directory` must say where checkpoints go when `checkpoint_every` is given, but "
                'is None: pass `directory="runs/mnist"`, say.'
            )
        self.model, self.optimizer = model, optimizer
        self.shards, self.seed = shards, seed
        self._is_unseeded = drawn_without_seed()
        self._kept = RunState(model, optimizer, resume_options)
        if self._scaling is not None:
            self.state[SCALER_KEY] = grad_scaler
        extra_state = ExtraState(model)
        if not extra_state.is_empty:
            self.state[EXTRA_STATE_KEY] = extra_state
        self.say: Callable[[str], None] = say
        self.before_snapshot: Callable[[], None] = lambda: None
        self.before_pause: Callable[[], None] = lambda: None
        self.checkpoints = (
            None
            if directory is None
            else Checkpoints(
                self.team,
                Path(directory),
                checkpoint_every,
                keep,
                resume,
                lambda line: self.say(line),
            )
        )
        self._engine: StepEngine | None = None
        self._memory: RunMemory | None = None
        self._plan: SamplePlan | None = None
        self.fingerprints = Fingerprints()
        self._has_looked = self._has_told_slow = False
        self._goes_on = False
        self.has_joined = self.is_ahead = False
        self.team.supervisor.tell(Ready())

    @property
    def position(self) -> Position:
        """How far the run has come."""
        return self._kept.position

    @property
    def state(self) -> dict[str, Any]:
        """What the program wants kept with the run: plain JSON, tensors, or objects with states.

        Objects have ``state_dict`` and ``load_state_dict``, as a schedule of learning rates has.
        Put them in before the first loop; all is as it was in checkpoints, in replacements of lost
        workers, and in steps that come again. What modules give in torch's `get_extra_state` is
        there already.
        """
        return self._kept.state

    @property
    def last(self) -> dict[str, Any]:
        """What the last step said (``"means"``), and what else the trainer notes; plain JSON."""
        return self._kept.last

    def steps(
        self,
        dataset: Any,
        *,
        batch_size: int,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool | None = None,
        sampler: Sampler | None = None,
        loader_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
    ) -> Generator[Step, None, None]:
        """Go on until the totals are reached; a finished run gives nothing.

        Collective: every rank calls it and uses every step, in the same order.

        Args:
            dataset: map-style, or an IterableDataset with a length, which every worker reads
                whole from its start, if it has no method ``shard(index, num_shards)`` that gives
                one shard's part; the same on every worker.
            batch_size: samples of one global batch, all workers together.
            epochs: how many epochs the run has in total.
            steps: how many steps the run has in total; with `epochs`, whichever comes first.
            shuffle: whether each epoch has an order of its own; None: it has, if no sampler is
                given.
            sampler: says the order: takes (epoch, seed) to indices, in each epoch equally many,
                some maybe several times; the same on every worker. Or one of torch's samplers.
            loader_workers: processes of each worker that read ahead while steps are computed;
                0: the worker reads for itself. Bits do not depend on it.
            collate_fn: makes a batch of a list of samples; None: torch's ``default_collate``.
            pin_memory: have batches in pinned memory, where there is a GPU to copy them to.

        Raises:
            TypeError: the dataset has no samples or no length, or a number is not whole.
            ValueError: a number does not fit.
            MismatchError: the workers do not agree.
            CheckpointError: the newest checkpoint belongs to another run.
        """
        plan = self.plan(dataset, batch_size, shuffle, sampler)
        loader_workers = check_whole("loader_workers", loader_workers, at_least=0)
        totals = Totals(epochs, steps)
        self._take_up(plan, totals)
        if self._goes_on:
            self.last.pop("stopped_at", None)
        if self.position.batch and plan != self._plan and not self.is_ahead:
            raise ValueError(
                f"dataset length, `batch_size`, `shards`, `shuffle` and `sampler` must stay within "
                f"an epoch, but were {self._plan} and are {plan}, after {self.position.batch} "
                f"steps of epoch {self.position.epoch}: finish the epoch first."
            )
        if not self.is_ahead:
            self._plan = plan
        self._tell_unseeded()
        order = SamplerOrder(plan, self._kept, self.team)

        def agree() -> bytes:
            return self._agree(plan, order, totals, self._known(dataset, loader_workers))

        self.joint_calls.together("start of a loop", agree)
        fetch = fetcher(
            dataset,
            seed=self.seed,
            collate_fn=collate_fn,
            batch_size=plan.batch_size,
            shards=self.shards,
        )
        make_loader = functools.partial(
            Loader, fetch, plan, num_processes=loader_workers, pin_memory=bool(pin_memory)
        )
        return self._steps(plan, order, totals, make_loader)

    def stop(self) -> None:
        """End the loop under way after the step under way, as if that were its last.

        Collective: every rank calls it, at the same step. The run has ended then: `steps` gives
        nothing more, also after a restart from its checkpoint, until :meth:`go_on` is called.
        """
        self.last["stopped_at"] = self.position.step
        self._goes_on = False

    def go_on(self) -> None:
        """Take back that the run was stopped, now or before it was started again. Collective."""
        self.last.pop("stopped_at", None)
        self._goes_on = True

    @property
    def _is_stopped(self) -> bool:
        stopped_at = self.last.get("stopped_at")
        return isinstance(stopped_at, int) and self.position.step >= stopped_at

    def plan(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool | None,
        sampler: Sampler | None = None,
    ) -> SamplePlan:
        """Plan which samples are computed where; raises as :meth:`steps` does."""
        return plan_samples(
            dataset, batch_size, shuffle, sampler, shards=self.shards, seed=self.seed
        )

    def _steps(
        self,
        plan: SamplePlan,
        order: SamplerOrder,
        totals: Totals,
        make_loader: Callable[..., Loader],
    ) -> Generator[Step, None, None]:
        if self._is_stopped and self.team.position == 0 and not self.is_ahead:
            self.say(
                f"the run was stopped at step {self.position.step} and stays there: call the "
                f"run's `go_on()` first, or leave out the callback that stopped it"
            )
        if self._is_over(totals):
            self._tell_finished(totals)
            return
        if self._engine is not None:
            raise RuntimeError("a run must finish one loop over `steps` before it begins another.")
        entry = self.joint_calls.enter_loop()
        if isinstance(entry, Passed):
            self._kept.apply_ended(entry, self.team)
            return
        # Who joins a loop under way comes behind what the others have agreed on.
        self.has_joined = is_agreed = entry is not None and entry.loop is not None
        with (
            self._loop(plan, entry) as under_way,
            make_loader(num_batches=totals.num_batches(plan, self.position)) as loader,
            open_loop(
                recovers=self.team.supervisor.can_replace,
                has_directory=self.checkpoints is not None,
            ) as opened,
        ):
            order.check()
            while True:
                is_over = self._is_over(totals)
                if is_over and under_way.end():
                    return
                if not is_over:
                    order.begin_epoch(is_agreed=is_agreed)
                is_agreed = False
                if not under_way.act() or self._is_over(totals):
                    continue
                step = Step(under_way.engine, plan, loader, self.position, under_way)
                yield step
                opened.check_is_inmost()
                step.check_finished()
                if not step.is_done:
                    under_way.undo()

    def _tell_unseeded(self) -> None:
        """Say once that weights are others in each start, where this is a start."""
        is_mine = self.team.position == 0 and not self.joint_calls.is_behind
        if not (self._is_unseeded and is_mine) or self.position.step or self.is_ahead:
            return
        line = (
            f"random numbers were drawn without a seed before this run was made, so weights that "
            f"come from them differ from one start to the next, and so will its result; `seed` "
            f"covers training alone: write `torch.manual_seed({self.seed})` before the model is "
            f"made"
        )
        if not notices():
            notices().add(line)
            self.say(line)

    def _tell_finished(self, totals: Totals) -> None:
        """Say why a loop gives nothing, unless that is said elsewhere."""
        is_told = self._is_stopped or self.is_ahead or self.joint_calls.is_behind
        if is_told or self.team.position or not self.position.step:
            return
        asked = " and ".join(
            f"`{name}={total}`"
            for name, total in (("epochs", totals.epochs), ("steps", totals.steps))
            if total is not None
        )
        more = "totals count from the beginning of a run, so pass higher ones to go on"
        if totals.are_passed(self.position):
            self.say(f"the run has come to step {self.position.step}, past {asked}: {more}")
        else:
            self.say(
                f"the run is already finished: nothing to do, as it has come to step "
                f"{self.position.step}, which is all of {asked}; {more}"
            )

    def _is_over(self, totals: Totals) -> bool:
        return self._is_stopped or totals.are_reached(self.position)

    @contextmanager
    def _loop(self, plan: SamplePlan, live: Live | None) -> Iterator[Loop]:
        def make_engine() -> StepEngine:
            exchange = chosen()(
                self.model,
                self.optimizer,
                shards=self.shards,
                team=self.team,
                new_key=self.joint_calls.new_key(),
                previous=self._memory,
                live=live,
            )
            self._memory = exchange.memory
            self._engine = StepEngine(
                self.model,
                self.optimizer,
                exchange,
                seed=self.seed,
                team=self.team,
                clipping=self._clipping,
                scaling=self._scaling,
            )
            return self._engine

        try:
            with loop(
                make_engine,
                live,
                team=self.team,
                joint_calls=self.joint_calls,
                kept=self._kept,
                plan=plan,
                identity=identity(plan, self.fixed),
                checkpoints=self.checkpoints,
                say=lambda line: self.say(line),
                before_snapshot=lambda: self.before_snapshot(),
                before_pause=lambda: self.before_pause(),
            ) as under_way:
                yield under_way
        finally:
            self._engine = None

    def _take_up(self, plan: SamplePlan, totals: Totals) -> None:
        """Go on from the newest checkpoint, at the first loop it is not ahead of. Collective."""
        if self.checkpoints is None:
            return
        if self._has_looked:
            self.checkpoints.take_turn()
            return
        if self.is_ahead and totals.are_passed(self.position):
            return
        fixed = identity(plan, self.fixed)
        taken_up = take_up(
            *(self.checkpoints, self._kept, plan, totals, fixed, self.team, self.joint_calls),
            is_first=not self.is_ahead,
        )
        if taken_up is Resumption.HERE:
            self._plan = plan
        self.is_ahead = taken_up is Resumption.AHEAD
        self._has_looked = not self.is_ahead

    def _known(self, dataset: Any, loader_workers: int) -> dict[str, object]:
        """Look at the data set, where there are other workers to compare it with."""
        length = length_of(dataset)
        if self.team.size == 1 or self.is_ahead:
            return {"dataset length": length}
        seen = self.fingerprints.of(
            dataset,
            length,
            self.team.membership,
            seed=self.seed,
            stream="train",
            epoch=self.position.epoch,
            in_fork=loader_workers > 0,
        )
        if seen.is_slow and self.team.position == 0 and not self._has_told_slow:
            self._has_told_slow = True
            self.say(
                "samples are not compared between the workers, as to read one takes more than "
                "0.1 s; that all have the same data set is known by its length alone"
            )
        return {"dataset length": length, **seen.facts}

    def _agree(
        self,
        plan: SamplePlan,
        order: SamplerOrder,
        totals: Totals,
        known: dict[str, object],
    ) -> bytes:
        self.team.agree(
            {
                "the step that the run has come to": self.position.step,
                "`batch_size`": plan.batch_size,
                "`shards`": plan.shards,
                "`seed`": plan.seed,
                **{f"`{name}`": value for name, value in self.fixed.items()},
                "`shuffle`": plan.shuffle,
                "`sampler`": plan.sampler,
                **order.facts,
                "`epochs`": totals.epochs,
                "`steps`": totals.steps,
                "the model with its optimizer": signature(self.model, self.optimizer),
                **told_modes(self.model, self.optimizer),
                "the number of threads": threads_per_worker(),
                "torch's version": torch.__version__,
            },
            known={**known, "samples of an epoch": plan.num_samples},
            remedy=REMEDY,
        )
        return b""

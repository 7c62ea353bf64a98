"""The step loop: every global batch once, for people with a loop of their own.

::

    run = unisono.Run(model, optimizer, shards=8, seed=0, directory="runs/mine")
    for step in run.steps(train_set, batch_size=64, epochs=3):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.checkpoint.contents import FORMAT, Snapshot, put_back, put_back_groups
from unisono.checkpoint.places import Places
from unisono.checkpoint.slots import files_of
from unisono.comm.history import History
from unisono.comm.host import Live, Passed
from unisono.comm.team import Team
from unisono.data.fetch import Fetch, fetcher, length_of
from unisono.engine.arena import Arena
from unisono.engine.contents import check_contents, signature
from unisono.engine.randomness import generators_put_back
from unisono.engine.shared import SharedEngine
from unisono.engine.threads import num_threads
from unisono.errors import CheckpointError
from unisono.plan.samples import SamplePlan
from unisono.plan.shards import assign
from unisono.train.boundary import Boundary, Plan
from unisono.train.checkpoints import Checkpoints, Found, identity
from unisono.train.interrupts import Interrupts, gentle_interrupts, say_on_stderr
from unisono.train.position import Position
from unisono.train.state import PREFIX, pack, unpack
from unisono.train.step import Step
from unisono.train.whole import check_whole
from unisono.world import num_devices, threads_per_worker


class Run:
    """A training run: the same result on any number of workers. Final.

    Making one is cheap and touches neither model nor optimizer. While :meth:`steps` is under way
    the parameters lie in memory shared by all workers; before and after, each worker's model is
    its own. When it begins, everybody takes the values of the lead, which is rank 0 unless that
    was lost.

    A worker that is killed costs nothing: the others compute its shards. If it is killed in the
    midst of an update, the run goes back to its latest snapshot, so that some steps come again; the
    block of the one under way then ends with ``step.is_done`` False.

    Args:
        model: on the CPU.
        optimizer: over the model's parameters.
        shards: S, the fixed number of parts of every global batch; at least the number of
            workers. None: the number of cores, at most 8, or the number of workers if larger.
        seed: of the order of samples and of all random numbers in training; ≥ 0.
        directory: where checkpoints are kept; None: nowhere.
        checkpoint_every: the interval, such as ``500`` (steps), ``"1 epoch"`` or ``"10min"``;
            with a directory there is always one when a loop ends.
        keep: how many checkpoints stay.
        resume: ``"auto"``: the first loop goes on from the newest checkpoint that is whole;
            ``"never"``: it begins anew.

    Attributes:
        shards: S.
        position: how far the run has come.
        last: what the last step said, ``"means"``, and what else the trainer notes.
        state: what the program wants kept with the run: plain JSON, tensors, or objects with
            ``state_dict`` and ``load_state_dict`` such as a schedule of learning rates. Put it in
            before the first loop; it is as it was in checkpoints, replacements and steps that come
            again.

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
    ) -> None:
        self.team = Team.from_environment()
        self.world = self.team.world
        if shards is None:
            shards = max(num_devices(), self.world.world_size)
        shards = check_whole("shards", shards, at_least=1)
        seed = check_whole("seed", seed, at_least=0)
        assign(shards, self.world.world_size)
        check_contents(model, optimizer)
        if directory is None and checkpoint_every is not None:
            raise ValueError(
                "`directory` must say where checkpoints go when `checkpoint_every` is given, but "
                'is None: pass `directory="runs/mnist"`, say.'
            )
        self.model, self.optimizer = model, optimizer
        self.shards, self.seed = shards, seed
        self.position = Position()
        self.state: dict[str, Any] = {}
        self.say: Callable[[str], None] = say_on_stderr
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
        self.history = History.of(self.team)
        self._engine: SharedEngine | None = None
        self._arena: Arena | None = None
        self._plan: SamplePlan | None = None
        self._has_looked = False
        self.last: dict[str, Any] = {}
        self.team.host.note_ready()

    def steps(
        self,
        dataset: Any,
        *,
        batch_size: int,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
    ) -> Generator[Step, None, None]:
        """Go on until the totals are reached; a finished run gives nothing.

        Collective: every rank calls it and uses every step, in the same order.

        Args:
            dataset: map-style; the same on every worker.
            batch_size: samples of one global batch, all workers together.
            epochs: how many epochs the run has in total.
            steps: how many steps the run has in total; with `epochs`, whichever comes first.
            shuffle: whether each epoch has an order of its own.

        Raises:
            TypeError: the dataset is not map-style.
            ValueError: a number does not fit.
            MismatchError: the workers do not agree.
            CheckpointError: the newest checkpoint belongs to another run.
        """
        plan = self.plan(dataset, batch_size, shuffle)
        _check_totals(epochs, steps)
        self._take_up(plan)
        if self.position.batch and plan != self._plan:
            raise ValueError(
                f"dataset length, `batch_size`, `shards` and `shuffle` must stay within an epoch, "
                f"but were {self._plan} and are {plan}, after {self.position.batch} steps of epoch "
                f"{self.position.epoch}: finish the epoch first."
            )
        self._plan = plan
        self.history.together(lambda: self._agree(plan, epochs, steps))
        return self._steps(plan, fetcher(dataset), epochs, steps)

    def plan(self, dataset: Any, batch_size: int, shuffle: bool) -> SamplePlan:
        """Plan which samples are computed where; raises as :meth:`steps` does."""
        batch_size = check_whole("batch_size", batch_size, at_least=1)
        return SamplePlan(length_of(dataset), batch_size, self.shards, bool(shuffle), self.seed)

    def _steps(
        self, plan: SamplePlan, fetch: Fetch, end_epoch: int | None, end_step: int | None
    ) -> Generator[Step, None, None]:
        position = self.position

        def is_over() -> bool:
            return (end_step is not None and position.step >= end_step) or (
                end_epoch is not None and position.epoch >= end_epoch
            )

        if is_over():
            return
        with self._loop(plan) as loop:
            order, order_of = plan.order(position.epoch), position.epoch
            while loop is not None:
                if is_over() and loop.end():
                    return
                if not loop.act() or is_over():
                    continue
                if order_of != position.epoch:
                    order, order_of = plan.order(position.epoch), position.epoch
                step = Step(
                    loop.engine,
                    plan,
                    fetch,
                    order,
                    number=position.step,
                    epoch=position.epoch,
                    batch=position.batch,
                    loop=loop,
                )
                yield step
                step.check_finished()

    @contextmanager
    def _loop(self, plan: SamplePlan) -> Iterator[_Loop | None]:
        """Share the parameters among the workers, with generators and threads put back after."""
        if self._engine is not None:
            raise RuntimeError("a run must finish one loop over `steps` before it begins another.")
        entry = self.history.enter_loop()
        if isinstance(entry, Passed):
            self._take_over(entry)
            yield None
            return
        loop: _Loop | None = None
        try:
            with ExitStack() as stack:
                stack.enter_context(generators_put_back())
                stack.enter_context(num_threads(threads_per_worker()))
                loop = self._begin(plan, entry, stack)
                try:
                    yield loop
                except GeneratorExit as exit:
                    # Left by `break`, everywhere alike, and not by an exception that only this
                    # worker may have.
                    if exit.__context__ is None:
                        loop.end()
                    raise
        finally:
            self._engine = None
            has_ended = loop is not None and loop.has_ended
            end = json.dumps({"position": self.position.as_json()}).encode()
            self.history.leave_loop(end if has_ended else None)

    def _begin(self, plan: SamplePlan, entry: Live | None, stack: ExitStack) -> _Loop:
        engine = SharedEngine(
            self.model,
            self.optimizer,
            shards=self.shards,
            seed=self.seed,
            team=self.team,
            key=self.history.index,
            arena=self._arena,
            live=entry,
        )
        self._engine, self._arena = engine, engine.state.arena
        stack.callback(engine.state.unbind)
        interrupts = Interrupts()
        if self.checkpoints is not None and not self.team.is_launched:
            interrupts = stack.enter_context(gentle_interrupts(lambda line: self.say(line)))
        boundary = Boundary(
            self.team, engine, lambda: self._pack(plan), self.checkpoints, interrupts
        )
        loop = _Loop(self, engine, boundary, plan)
        if entry is not None and entry.loop is not None:
            self._load(engine)
            self.team.faults.meet("join", self.position.step)
        elif boundary.begin():
            facts = {**self._arena.places.as_json(), "shards": self.shards, "directory": None}
            if self.checkpoints is not None:
                facts |= self.checkpoints.facts
            self.history.note_loop(facts)
        if not _keeps_schedules(self.optimizer, self.state):
            self.team.host.give_up_recovery(
                'a learning-rate schedule is not kept: write `run.state["schedule"] = schedule`'
            )
        return loop

    def go_back(self, engine: SharedEngine) -> None:
        """Go back to the newest snapshot, as a worker was lost in the midst of an update."""
        engine.go_back()
        self._load(engine)

    def _pack(self, plan: SamplePlan) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Take what is to be kept with a snapshot, besides the engine's own."""
        packed, tensors = pack(self.state)
        facts = {
            "format": FORMAT,
            "position": self.position.as_json(),
            "identity": identity(plan),
            "state": packed,
            "last": self.last,
            "schedules": [],
        }
        return facts, tensors

    def _load(self, engine: SharedEngine) -> None:
        """Take over what was kept beside the newest snapshot."""
        facts, extras = engine.state.newest()
        self.position.move_to(**facts["position"])
        self.last = facts["last"]
        put_back_groups(facts["groups"], self.optimizer)
        unpack(facts["state"], extras, self.state)

    def _take_over(self, entry: Passed) -> None:
        """Be, as a replacement, where the others were at the end of a loop."""
        assert entry.loop is not None
        places = Places.from_json(entry.loop)
        memory = self.team.memory(places.key, places.num_bytes)
        slot = places.newest(memory.read)
        assert slot is not None
        view = memory.view(places.slots_at[slot], places.slot_bytes)
        files = {name: b"".join(chunks) for name, chunks in files_of(view, places.blob_at).items()}
        self._load_snapshot(Snapshot.from_files(files))
        self.position.move_to(**json.loads(entry.payload)["position"])

    def _take_up(self, plan: SamplePlan) -> None:
        """Go on from the newest checkpoint, at the first loop only. Collective.

        Raises:
            CheckpointError: the run was another one, or its state does not fit this model.
        """
        if self.checkpoints is None or self._has_looked:
            return
        self._has_looked = True
        checkpoints = self.checkpoints
        found: Found | None = None

        def speak() -> bytes:
            nonlocal found
            try:
                found = checkpoints.find(plan)
            except (CheckpointError, OSError) as error:
                return json.dumps({"error": str(error)}).encode()
            if found is None:
                return b"{}"
            position = found.snapshot.facts["position"]
            return json.dumps({"path": found.path, "position": position}).encode()

        heard = self.history.together(lambda: self.team.hear_lead(speak, "taking up"))
        answer = json.loads(heard)
        if "error" in answer:
            raise CheckpointError(answer["error"])
        checkpoints.begin(None)
        if answer:
            self.position.move_to(**answer["position"])
            self._plan = plan
            checkpoints.begin(self.position.step)
            try:
                snapshot = found.snapshot if found is not None else checkpoints.read(answer["path"])
            except CheckpointError:
                # A replacement that comes late takes the state from the others.
                if not self.team.is_replacement:
                    raise
            else:
                self._load_snapshot(snapshot)

    def _load_snapshot(self, snapshot: Snapshot) -> None:
        put_back(snapshot, self.model, self.optimizer)
        self.position.move_to(**snapshot.facts["position"])
        self.last = snapshot.facts["last"]
        tensors = {PREFIX + key: tensor for key, tensor in snapshot.state_tensors.items()}
        unpack(snapshot.facts["state"], tensors, self.state)

    def _agree(self, plan: SamplePlan, epochs: int | None, steps: int | None) -> bytes:
        self.team.agree(
            {
                "the step that the run has come to": self.position.step,
                "dataset length": plan.num_samples,
                "`batch_size`": plan.batch_size,
                "`shards`": plan.shards,
                "`seed`": plan.seed,
                "`shuffle`": plan.shuffle,
                "`epochs`": epochs,
                "`steps`": steps,
                "the model with its optimizer": signature(self.model, self.optimizer),
                "the number of threads": threads_per_worker(),
                "torch's version": torch.__version__,
            }
        )
        return b""


class _Loop:
    """One loop over steps, as its steps see it. Final."""

    def __init__(
        self, run: Run, engine: SharedEngine, boundary: Boundary, plan: SamplePlan
    ) -> None:
        self.engine, self.boundary = engine, boundary
        self.planned = Plan.NOTHING
        self.has_ended = False
        self.is_between_steps = True
        self._run, self._sample_plan = run, plan

    def act(self) -> bool:
        """Do what was planned before the next step. Collective.

        Returns:
            Whether the next step is still the next; False if the run had to go back.
        """
        planned, self.planned = self.planned, Plan.NOTHING
        if not self.engine.state.is_lost:
            self.boundary.act(planned, self._run.position.step)
        if self.engine.state.is_lost:
            self.go_back()
            return False
        return True

    def end(self) -> bool:
        """Keep what the loop has led to, at its end or where it is left. Collective.

        Returns:
            Whether it is kept; False if the run has to go back first, or a step is under way.
        """
        if self.is_between_steps and not self.engine.state.is_lost:
            self.has_ended = self.boundary.end(self._run.position.step)
        return self.has_ended

    def plan(self) -> Plan:
        """Say what is to be done after the step under way; only the lead's word counts."""
        after = self._run.position.after(self._sample_plan.steps_per_epoch)
        return self.boundary.plan(after)

    def count(self, means: Mapping[str, float]) -> None:
        """Count a step that is done."""
        run = self._run
        run.position.advance(self._sample_plan.steps_per_epoch)
        run.last["means"] = dict(means)
        self.planned = Plan(run.team.planned(run.position.step))
        self.is_between_steps = True

    def go_back(self) -> None:
        """Go back to the newest snapshot."""
        self._run.go_back(self.engine)
        self.planned = Plan.NOTHING
        self.is_between_steps = True


def _keeps_schedules(optimizer: Optimizer, state: Mapping[str, Any]) -> bool:
    """Tell whether a schedule that steps with this optimizer, if there is one, is kept."""
    has_one = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    return not has_one or any(isinstance(value, LRScheduler) for value in state.values())


def _check_totals(epochs: int | None, steps: int | None) -> None:
    if epochs is None and steps is None:
        raise ValueError("`epochs` or `steps` must say when the run ends: pass `epochs=3`, say.")
    for name, total in (("epochs", epochs), ("steps", steps)):
        if total is not None:
            check_whole(name, total, at_least=0)

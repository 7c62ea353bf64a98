"""The step loop: every global batch once, for people with a loop of their own.

::

    run = unisono.Run(model, optimizer, shards=8, seed=0)
    for step in run.steps(train_set, batch_size=64, epochs=3):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm.team import Team
from unisono.data.fetch import Fetch, fetcher, length_of
from unisono.engine.arena import Arena
from unisono.engine.contents import check_contents, signature
from unisono.engine.randomness import generators_put_back
from unisono.engine.shared import SharedEngine
from unisono.engine.threads import num_threads
from unisono.plan.samples import SamplePlan
from unisono.plan.shards import assign
from unisono.train.step import Step
from unisono.world import num_devices, threads_per_worker


@dataclass(slots=True)
class Position:
    """How far a run has come.

    Attributes:
        step: steps done, over the whole run.
        epoch: epochs done.
        batch: global batches done in the epoch under way.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0

    def advance(self, steps_per_epoch: int) -> None:
        """Count one more step."""
        self.step += 1
        self.batch += 1
        if self.batch == steps_per_epoch:
            self.epoch += 1
            self.batch = 0


class Run:
    """A training run: the same result on any number of workers. Final.

    Making one is cheap and touches neither model nor optimizer. While :meth:`steps` is under way
    the parameters lie in memory shared by all workers; before and after, each worker's model is
    its own. When it begins, everybody takes the values of rank 0.

    Args:
        model: on the CPU.
        optimizer: over the model's parameters.
        shards: S, the fixed number of parts of every global batch; at least the number of
            workers. None: the number of cores, at most 8, or the number of workers if larger.
        seed: of the order of samples and of all random numbers in training; ≥ 0.

    Attributes:
        shards: S.
        position: how far the run has come.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument does not fit; the message says what to do.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, shards: int | None = None, seed: int = 0
    ) -> None:
        self.team = Team.from_environment()
        self.world = self.team.world
        if shards is None:
            shards = max(num_devices(), self.world.world_size)
        shards = check_whole("shards", shards, at_least=1)
        seed = check_whole("seed", seed, at_least=0)
        assign(shards, self.world.world_size)
        check_contents(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self.shards, self.seed = shards, seed
        self.position = Position()
        self._engine: SharedEngine | None = None
        self._arena: Arena | None = None
        self._plan: SamplePlan | None = None

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
        """
        plan = self.plan(dataset, batch_size, shuffle)
        _check_totals(epochs, steps)
        if self.position.batch and plan != self._plan:
            raise ValueError(
                f"dataset length, `batch_size`, `shards` and `shuffle` must stay within an epoch, "
                f"but were {self._plan} and are {plan}, after {self.position.batch} steps of epoch "
                f"{self.position.epoch}: finish the epoch first."
            )
        self._plan = plan
        self._agree(plan, epochs, steps)
        return self._steps(plan, fetcher(dataset), epochs, steps)

    def take_position(self, position: Position, plan: SamplePlan) -> None:
        """Go on from `position`, which a checkpoint of a run with the same plan has kept."""
        self.position, self._plan = position, plan

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
        with self._bound() as engine:
            order, order_of = plan.order(position.epoch), position.epoch
            while not is_over():
                if order_of != position.epoch:
                    order, order_of = plan.order(position.epoch), position.epoch
                step = Step(
                    engine,
                    plan,
                    fetch,
                    order,
                    number=position.step,
                    epoch=position.epoch,
                    batch=position.batch,
                    count=lambda: position.advance(plan.steps_per_epoch),
                )
                yield step
                step.check_finished()

    @contextmanager
    def _bound(self) -> Iterator[SharedEngine]:
        """Share the parameters among the workers, with generators and threads put back after."""
        if self._engine is not None:
            raise RuntimeError("a run must finish one loop over `steps` before it begins another.")
        with generators_put_back(), num_threads(threads_per_worker()):
            engine = SharedEngine(
                self.model,
                self.optimizer,
                shards=self.shards,
                seed=self.seed,
                team=self.team,
                arena=self._arena,
            )
            self._engine, self._arena = engine, engine.arena
            try:
                yield engine
            finally:
                self._engine = None
                engine.unbind()

    def _agree(self, plan: SamplePlan, epochs: int | None, steps: int | None) -> None:
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


def check_whole(name: str, value: Any, *, at_least: int) -> int:
    """Refuse anything but a whole number that is large enough, and give it as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is too small.
    """
    example = f"pass `{name}={max(at_least, 1)}`, say"
    try:
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a whole number, but is {value!r}: {example}.") from None
    if whole < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, but is {whole}: {example}.")
    return whole


def _check_totals(epochs: int | None, steps: int | None) -> None:
    if epochs is None and steps is None:
        raise ValueError("`epochs` or `steps` must say when the run ends: pass `epochs=3`, say.")
    for name, total in (("epochs", epochs), ("steps", steps)):
        if total is not None:
            check_whole(name, total, at_least=0)

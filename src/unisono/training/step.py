"""One step, as the loop's body sees it: this worker's shards, and where their losses go."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType, TracebackType
from typing import Any

import torch

from unisono.data.loader import Loader, ShardPosition
from unisono.engine.state.run_state import Position
from unisono.engine.step.records import Phase, StepMeans, UndoneMeans
from unisono.errors import NonFiniteLossError
from unisono.plan.samples import SamplePlan
from unisono.programs.iterators import is_iterator
from unisono.programs.live import is_looped_over
from unisono.runtime.device import host
from unisono.runtime.habits import attributes_met
from unisono.runtime.training_progress import now
from unisono.training.body_rehearsal import BodyRehearsal
from unisono.training.boundary import Boundary
from unisono.training.callbacks.callback import DoneStep, KeptStep
from unisono.training.failing_step import Explanation, failing_shard
from unisono.training.given_gradients import check_given
from unisono.training.hints import NO_GRAPH
from unisono.training.whole_batch import (
    BatchRows,
    Embed,
    WholeBatchLoss,
    gathered,
    left_by_all,
    rows_of_batch,
)

AT_FIRST, EVERY = 2, 1024  # steps that run the expensive checks


def is_due(num_looks: int, step: int) -> bool:
    """Return whether a step runs the expensive checks of a loop."""
    return num_looks < AT_FIRST or step & (step - 1) == 0 or step % EVERY == 0


@attributes_met("the step")
class Step(DoneStep):
    """One global batch and its update. Created by ``Run.steps``.

    Use it as ``with step:``; when the block ends, gradients are summed and parameters updated. With
    several optimizers it may contain blocks that update some of them; see :meth:`update`. After the
    block it has the results of a :class:`unisono.callbacks.DoneStep`.

    Attributes:
        is_done: after the step's block: whether the step counts. False if a worker was lost during
            the step: it will be repeated, and possibly some steps before it. Until then, `number`,
            `epoch` and the means are those of the last step that counts; -1 if there is none.
    """

    rehearse: Callable[[FrameType], BodyRehearsal] | None = None

    def __init__(
        self, boundary: Boundary, plan: SamplePlan, loader: Loader, position: Position
    ) -> None:
        self.number, self.epoch, self.batch = position.step, position.epoch, position.batch
        self.num_samples = plan.num_batch_samples(self.batch)
        self.means: StepMeans = StepMeans({})
        self.per_sample: dict[str, torch.Tensor] = {}
        self.gradient_norm: float | None = None
        self.is_skipped = self.is_done = False
        self._boundary, self._engine, self._loader = boundary, boundary.engine, loader
        self._finish_shard = self._engine.finish_shard  # until the step is known to fail
        self._engine.passes.at = self.number, self.epoch, self.batch
        self._engine.passes.leave_shards()
        self._plan, self._shard_sizes = plan, plan.shard_sizes(self.batch)
        self._entered = self._is_finished = self.is_gathered = False
        self._kept: dict[int, Any] = {}  # batches already read, by shard
        self._data: KeptStep | None = None
        self._begin()

    def _begin(self) -> None:
        self._waiting: int | None = None
        self._newest, self._taken, self._is_looped_over = 0, False, False
        self._rehearsal: BodyRehearsal | None = None
        self._given_out: Iterator[Any] = iter(())
        self._done: set[int] = set()
        self._have_all_arrived = False

    @property
    def loss(self) -> float:
        """The mean loss over the global batch, once the block has ended."""
        if not self._is_finished or (self.is_done and not self.means):
            raise RuntimeError("`step.loss` is available once the `with step:` block has ended.")
        return self.means["loss"]

    @property
    def indices(self) -> list[int]:
        """The dataset indices of the samples in the global batch, in order."""
        whole = BatchRows(self._plan, self.batch)
        (indices,) = whole.joined({v: [torch.tensor(self._indices(v))] for v in whole.shards})
        return list(map(int, indices))

    @property
    def as_data(self) -> KeptStep:
        """The results of the step, which the program may store; without means until it is done."""
        if self._data is None or self._data.is_done != self.is_done:
            self._data = KeptStep(*(getattr(self, name) for name in KeptStep._fields))
        return self._data

    @property
    def waiting(self) -> tuple[int, int, float]:
        """The shard being computed, its number of samples, and their part of the global batch."""
        shard = self._waiting
        assert shard is not None
        return shard, self._shard_sizes[shard], self._shard_sizes[shard] / self.num_samples

    @property
    def newest(self) -> tuple[int, int]:
        """The shard whose batch was yielded last, and its number of samples."""
        return self._newest, self._shard_sizes[self._newest]

    @property
    def shards(self) -> Iterator[Any]:
        """The batches of this worker's shards, one after another.

        Before each one is yielded, generators are seeded for it and buffers restored. Compute it
        at once, with :meth:`backward`, before you take the next.
        """
        if not self._entered:
            raise RuntimeError("a step must be entered before it is used: write `with step:`.")
        if self._taken:
            raise RuntimeError(
                f"`step.shards` can be iterated only once per step, but is iterated again in step "
                f"{self.number}: do everything with a batch inside that loop."
            )
        self._taken = True
        if self.rehearse is not None:
            self._is_looped_over = is_looped_over(sys._getframe(1))
        self._given_out = batches = self._batches()
        return batches

    def _batches(self) -> Iterator[Any]:
        # First, as workers meet there; one that is lost meanwhile has no shards yet.
        self._rehearsal = None if self.rehearse is None else self.rehearse(sys._getframe(1))
        more: Sequence[int] | None = self._engine.begin_passes()
        while more is not None:
            yield from self._compute(more)
            if self._rehearsal is not None:
                yield from self._rehearsal.once_more(self._start_again, is_within=self._is_within)
                self._end_rehearsal()
            if self._loader.copies_early:
                # While the device computes the last shard, before this worker waits for others.
                self._loader.take_early()
                self._engine.timers.lap(Phase.LOADING)
            # A worker that was lost meanwhile leaves shards, which the others compute now.
            more = self._engine.arrive()
        self._engine.end_passes()
        self._have_all_arrived = True
        if self._engine.records.bad and (shard := failing_shard(self._engine)) in self._done:
            yield from self._explain(shard)

    @property
    def _is_within(self) -> bool:
        """Whether the program takes batches through an iterator, such as `enumerate`."""
        if self._is_looped_over:
            return False
        return any(map(is_iterator, gc.get_referrers(self._given_out)))  # this is slow

    def _compute(self, shards: Sequence[int]) -> Iterator[Any]:
        for shard in shards:
            if self._shard_sizes[shard] == 0:
                self._engine.skip_shard(shard)
                self._done.add(shard)
                continue
            if self._done and self._loader.runs_program:
                self._engine.exchange.buffers.restore()  # a dataset may read them
            batch = self._kept.pop(shard) if shard in self._kept else self._read(shard)
            if self._engine.passes.watch is not None:
                self._engine.passes.watch.read(shard, batch)
            # After reading, so that what a dataset draws never shifts what the model draws.
            self._engine.start_shard(shard)
            self._waiting = self._newest = shard
            if self._rehearsal is not None:
                self._rehearsal.note(shard, self._shard_sizes[shard], batch)
            yield batch
            if self._waiting is not None:
                raise RuntimeError(
                    f"`step.backward(loss)`, not `loss.backward()`, must be called before the next "
                    f"batch is taken, but shard {shard} of step {self.number} has no loss."
                )

    def _start_again(self, shard: int, take: Callable[[Any], None]) -> None:
        """Prepare to repeat a shard's passes, whose loss is only compared."""

        def finish(shard: int, returned: Any, num_samples: int, share: float) -> None:
            take(returned)

        self._engine.start_shard(shard)
        self._finish_shard, self._waiting = finish, shard

    def _end_rehearsal(self) -> None:
        if self._finish_shard is not self._engine.finish_shard:
            self._engine.guard.guard_gradients()
        self._finish_shard, self._rehearsal = self._engine.finish_shard, None

    def _read(self, shard: int) -> Any:
        try:
            return self._loader.batch(self._at(shard), self._engine.passes.shards)
        except RuntimeError as error:
            self._explanation.check_memory(error, "copy of a batch", shard)
            raise

    def read_again(self, shard: int) -> Any:
        """Read a shard's batch again, in this process, without advancing a generator."""
        with self._engine.passes.generators_put_back(), now().put_back():
            return self._loader.batch(self._at(shard), ())

    def read_rows(self, shard: int, choices: Sequence[Sequence[int]]) -> list[Any]:
        """Read batches of some of a shard's samples, by their places in it; no generator moves."""
        with self._engine.passes.generators_put_back(), now().put_back():
            return self._loader.rows(self._at(shard), choices)

    def _explain(self, shard: int) -> Iterator[Any]:
        """Yield a shard's batch again, to find out what makes the step fail."""
        with suppress(Exception):  # the step's error is raised in any case
            batch = self._loader.batch(self._at(shard), ())
            self._explanation.begin(shard, batch)
            self._finish_shard, self._waiting = self._explanation.take, shard
            yield batch
            self._waiting = None

    @functools.cached_property
    def _explanation(self) -> Explanation:
        """Explains why the step fails; created once something is wrong."""
        return Explanation(self._boundary.run, self.number, self._indices)

    def _at(self, shard: int) -> ShardPosition:
        return ShardPosition(self.epoch, self.batch, shard)

    def _indices(self, shard: int) -> list[int]:
        return self._loader.indices(self._at(shard))

    def backward(self, loss: Any, *, create_graph: bool = False) -> None:
        """Differentiate one shard's loss; call it once for each batch of :attr:`shards`.

        It takes the gradients: until the block ends, ``.grad`` is empty, and code that reads or
        edits it is refused. Clip with the run's `clip_norm` or `clip_value`; a hook of a parameter
        (``register_hook``) sees each shard's gradient.

        Args:
            loss: the mean over the shard (a scalar), or ``(sum, weight)`` (a weight of None: a sum
                over the global batch), or a dict with ``"loss"`` and further scalars or pairs, or
                integers, which are added up. Its ``"per_sample"`` is a dict of tensors with one
                row per sample.
            create_graph: must be False: call ``torch.autograd.grad(…, create_graph=True)`` before.

        Raises:
            TypeError, ValueError: `loss` has none of these forms.
            NonFiniteLossError: when the block ends: the loss is NaN or infinite. The batch is
                yielded again to find the cause.
            NondeterministicError: on an accelerator, an operation has no deterministic kernel.
        """
        shard = self._waiting
        if shard is None:
            raise RuntimeError(
                "`step.backward` must be called once for each batch of `step.shards`, but there "
                "is no batch without its loss now: call it inside the loop over `step.shards`, "
                "with the sum if a batch has several losses."
            )
        if create_graph:
            raise ValueError(NO_GRAPH)
        num_samples = self._shard_sizes[shard]
        if self._rehearsal is not None:
            self._rehearsal.note_loss(shard, loss)
        self._finish_shard(shard, loss, num_samples, num_samples / self.num_samples)
        self._waiting = None
        self._done.add(shard)

    def update(
        self, *names: str, gradients: Mapping[str, torch.Tensor] | None = None
    ) -> AbstractContextManager[Step]:
        """Update some of the run's optimizers, within the block of the step.

        Collective. Use it as ``with step.update("generator"):``, with a loop over :attr:`shards`
        inside, as in a step: the gradients of all shards are summed, and these optimizers step.
        Gradients that reach other parameters are dropped. A step may have any number of updates,
        also several of one optimizer; without any, it updates all optimizers from one loss. After
        the block, `means`, `gradient_norm` and `is_skipped` are those of the update; after the
        step, `means` has those of all, as ``"generator.loss"``, and the sum of losses, ``"loss"``.

        Args:
            names: the names of the optimizers in the run; none if there is only one.
            gradients: by the names of parameters, instead of a loop over :attr:`shards`, for an
                update whose gradient is not a sum over shards (a hypergradient, Reptile's outer
                step); equal on all workers. A parameter that you leave out has no gradient, and
                ``{}`` skips the update.

        Raises:
            MismatchError: workers pass different gradients.
            ValueError: a name is unknown, or no gradient reaches an optimizer's parameters.
            RuntimeError: the update is not within the step, or does not loop over its shards.
        """
        if names or gradients is None:
            raise ValueError(
                "`step.update` is for runs with several optimizers, but this one has one: leave it "
                "out, and write `with step:` alone; or give it `gradients`, without a name."
            )
        self._use_gradients(gradients)
        return nullcontext(self)

    def _use_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Use gradients that the program has computed, without passes. Collective."""
        if not self._entered or self._taken:
            raise RuntimeError(
                f"`step.update(gradients=…)` must be called once, within `with step:`, instead of "
                f"a loop over `step.shards`; in step {self.number} it was not."
            )
        engine, self._taken = self._engine, True
        check_given(gradients, engine, self._boundary.run)
        more: Sequence[int] | None = engine.begin_passes()
        while more is not None:
            for shard in more:
                engine.give_shard(shard, gradients)
                self._done.add(shard)
            more = engine.arrive()
        engine.end_passes()
        self._have_all_arrived = True

    def gather(self, embed: Embed, loss: Callable[[Any], Any]) -> None:
        """Train on a loss over the features of the whole global batch, such as a contrastive one.

        Use it instead of a loop over :attr:`shards`. Collective: every rank calls it. Each shard is
        embedded twice; memory holds one shard's graph at a time, and all features.

        Args:
            embed: maps a batch to a tensor with one row of features per sample, or to several in
                a tuple, list or dict.
            loss: maps all features, in the order of the global batch, to what :meth:`backward`
                takes; the same on every worker. Generators are seeded for it.

        Raises:
            RuntimeError: the step's shards are already taken.
            TypeError: `embed` does not return rows.
        """
        if not self._entered or self._taken:
            raise RuntimeError(
                "`step.gather` must be called once, within `with step:`, instead of a loop over "
                "`step.shards`."
            )
        whole = WholeBatchLoss(BatchRows(self._plan, self.batch), embed, loss)
        self.is_gathered = True

        def embedded(shard: int) -> list[torch.Tensor]:
            self._kept[shard] = batch = self._read(shard)
            self._engine.start_shard(shard)
            self._waiting = shard  # for errors
            leaves = whole.features_of(batch, self._shard_sizes[shard])
            self._waiting = None
            return leaves

        features = gathered(whole.shards, self._boundary.run, self._engine, embedded)
        for batch in self.shards:
            shard, num_samples, _ = self.waiting
            leaves = whole.features_of(batch, num_samples)
            self.backward(whole.of_shard(shard, leaves, features, self._engine))

    def again(self, loss: Callable[[Any], Any]) -> None:
        """Set, within the block, how a batch's loss is computed by optimizers that take a closure.

        They request the loss again with other parameters: this worker's shards are then computed
        again, from the same samples and with the same random numbers. ``Trainer`` calls this for
        you; other optimizers ignore it.

        Args:
            loss: maps a batch to what :meth:`backward` takes.
        """

    def check_finished(self) -> None:
        """Raise RuntimeError if the step was never entered."""
        if not self._is_finished:
            raise RuntimeError(
                f"every step must be used as `with step:`, but step {self.number} was not, or an "
                f"exception that the loop has caught left it: to skip a batch, compute its loss "
                f"times 0, or leave the loop by the exception and begin it again."
            )

    def __enter__(self) -> Step:
        if self._entered:
            raise RuntimeError(
                f"a step must be entered once, but step {self.number} is entered again."
            )
        first = next(shard for shard, size in enumerate(self._shard_sizes) if size)
        self._boundary.begin_step(self.number)
        self._engine.begin(self.number, first)
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if error is not None or not self._have_all_arrived:
            self._engine.end_passes()
        try:
            self._finish(error)
        finally:
            if not self._is_finished:
                # Each worker's last shard has left others, and the program may catch the error.
                with suppress(RuntimeError):  # the step's error is raised in any case
                    self._engine.exchange.buffers.restore()
                if self._engine.is_unchanged:
                    self._boundary.abandon_step()
        if error is None and self.is_done:
            self._boundary.count(self.means)
        return None

    def _abandon(self) -> None:
        """Leave a step that cannot be finished because a worker was lost."""
        self._engine.guard.release_gradients()
        self._boundary.roll_back()
        self._show_undone()

    def _show_undone(self) -> None:
        """Set results that the rest of the loop's body can read.

        As they are those of the last step that counts, a `break` that did not leave the loop then
        does not leave it now.
        """
        self._is_finished, self.is_done = True, False
        self.number, self.epoch, means = self._boundary.last_done
        self.means = UndoneMeans(means)

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            backward = Step.backward.__code__
            if self._explanation.is_of(error, self._in_step(), self._waiting, backward):
                return
        missing = [shard for shard in self._engine.passes.shards if shard not in self._done]
        if missing:
            raise self._explanation.of_missing(missing)
        if not self._have_all_arrived and self._engine.arrive() is not None:
            # The lost shards belong at the end of `step.shards`, which the loop has already left.
            self._abandon()
            return
        self._boundary.plan_next()
        if self._engine.records.has_rows:
            whole, team = BatchRows(self._plan, self.batch), self._boundary.run.team
            rows = rows_of_batch(whole, self._engine.records.per_sample, team, host())
            if rows is None:
                self._abandon()
                return
            self.per_sample = rows
        if (buffers := self._engine.passes.combined) is not None:
            left = left_by_all(buffers.left, self._boundary.run.team)
            if left is None:
                self._abandon()
                return
            buffers.finish(left, self._shard_sizes)
        try:
            self.means, self.is_done = self._engine.finish()
        except NonFiniteLossError as raised:
            raise self._explanation.of_values(raised) from None
        except Exception as raised:
            self._explanation.note_update(raised, self._in_step())
            raise
        self.gradient_norm = self._engine.sums.norm
        self.is_skipped = self._engine.sums.are_skipped
        self._is_finished = True
        if not self.is_done:
            self._boundary.roll_back()
            self._show_undone()

    def _in_step(self) -> str:
        return f"in step {self.number}"

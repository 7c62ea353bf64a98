"""One step, as the loop's body sees it: this worker's shards, and a place to leave their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from unisono.data.fetch import Fetch
from unisono.engine.loss import read_loss
from unisono.engine.shared import SharedEngine
from unisono.plan.samples import SamplePlan


class Step:
    """One global batch and the update that it leads to. Made by ``Run.steps``; final.

    Used as ``with step:``; when the block ends, gradients are summed and parameters updated.

    Attributes:
        number: counted from 0 over the whole run.
        epoch: counted from 0.
        batch: which global batch of the epoch, counted from 0.
        num_samples: of the global batch, on all workers together.
        means: after the block: the loss and other scalars by name, each the exact mean over the
            global batch, the same on every worker.
    """

    def __init__(
        self,
        engine: SharedEngine,
        plan: SamplePlan,
        fetch: Fetch,
        order: torch.Tensor,
        *,
        number: int,
        epoch: int,
        batch: int,
        count: Callable[[], None],
    ) -> None:
        self.number, self.epoch, self.batch = number, epoch, batch
        self.num_samples = plan.num_batch_samples(batch)
        self.means: dict[str, float] = {}
        self._engine, self._plan, self._fetch, self._order = engine, plan, fetch, order
        self._count = count
        self._waiting: int | None = None
        self._entered = False
        self._taken = False
        self._done: set[int] = set()
        self._is_finished = False

    @property
    def loss(self) -> float:
        """The mean loss over the global batch, once the block has ended."""
        if not self._is_finished:
            raise RuntimeError("`step.loss` is there once the `with step:` block has ended.")
        return self.means["loss"]

    @property
    def shards(self) -> Iterator[Any]:
        """The batches of the shards that this worker computes, one after the other.

        Before each one is given out, generators are seeded for it and buffers put back, so the
        loop's body computes it at once, with :meth:`backward`, before it takes the next.
        """
        if not self._entered:
            raise RuntimeError("a step must be entered before it is used: write `with step:`.")
        if self._taken:
            raise RuntimeError(
                f"`step.shards` must be looped over once, but is taken again in step "
                f"{self.number}: keep the batches in a list to use them twice."
            )
        self._taken = True
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for shard in self._engine.shards:
            self._check_differentiated()
            indices = self._plan.shard_indices(self._order, self.batch, shard)
            if len(indices) == 0:
                self._engine.skip_shard(shard)
                self._done.add(shard)
                continue
            self._engine.start_shard(self.number, shard)
            batch = self._fetch(indices)
            self._waiting = shard
            yield batch
        self._check_differentiated()

    def backward(self, loss: Any) -> None:
        """Differentiate one shard's loss; once for each batch of :attr:`shards`.

        Args:
            loss: the mean over the shard (a scalar), or ``(sum, weight)``, or a dict with
                ``"loss"`` and further scalars or pairs.

        Raises:
            TypeError, ValueError: it is no such loss.
            NonFiniteLossError: it is NaN or infinite.
        """
        shard = self._waiting
        if shard is None:
            raise RuntimeError(
                "`step.backward` must be called once for each batch of `step.shards`, but there "
                "is no batch without its loss now: call it inside the loop over `step.shards`."
            )
        num_samples = self._plan.shard_size(self.batch, shard)
        share = num_samples / self.num_samples
        self._engine.finish_shard(self.number, shard, read_loss(loss, num_samples), share)
        self._waiting = None
        self._done.add(shard)

    def check_finished(self) -> None:
        """Refuse to go on after a step that nobody entered."""
        if not self._is_finished:
            raise RuntimeError(
                f"every step must be used as `with step:`, but step {self.number} was not."
            )

    def __enter__(self) -> Step:
        if self._entered:
            raise RuntimeError(f"a step must be entered once, but step {self.number} is again.")
        keeper = next(
            shard
            for shard in range(self._plan.shards)
            if self._plan.shard_size(self.batch, shard) > 0
        )
        self._engine.begin(self.number, keeper)
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        missing = [shard for shard in self._engine.shards if shard not in self._done]
        if missing:
            raise RuntimeError(
                f"`step.backward` must be called for every batch of `step.shards`, but shards "
                f"{missing} of step {self.number} have no loss: loop over all of `step.shards`."
            )
        self.means = self._engine.finish(self.number).means
        self._count()
        self._is_finished = True

    def _check_differentiated(self) -> None:
        if self._waiting is not None:
            raise RuntimeError(
                f"`step.backward` must be called before the next batch is taken, but shard "
                f"{self._waiting} of step {self.number} has no loss: call `step.backward(loss)`."
            )

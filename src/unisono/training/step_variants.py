"""Steps that compute their shards several times: for closures, and for alternating updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, final

import torch
from typing_extensions import override

from unisono.data.loader import Loader
from unisono.engine.state.run_state import Position
from unisono.engine.step.closure_engine import ClosureEngine
from unisono.engine.step.records import StepMeans
from unisono.errors import NonFiniteLossError
from unisono.plan.samples import SamplePlan
from unisono.training.boundary import Boundary
from unisono.training.several_models import check_optimizer_names
from unisono.training.step import Step


@final
class ClosureStep(Step):
    """A :class:`Step` whose shards are computed as often as its optimizer requests."""

    def __init__(
        self, boundary: Boundary, plan: SamplePlan, loader: Loader, position: Position
    ) -> None:
        super().__init__(boundary, plan, loader, position)
        assert isinstance(self._engine, ClosureEngine)
        self._closures: ClosureEngine = self._engine
        self._given = boundary.run.loss
        self._compute_loss_again: Callable[[Any], Any] | None = None

    @override
    def again(self, loss: Callable[[Any], Any]) -> None:
        if not callable(loss):
            raise TypeError(
                f"`step.again` takes a function that computes a batch's loss, but got a "
                f"{type(loss).__name__}: pass `lambda batch: loss(model, batch)`."
            )
        self._compute_loss_again = loss

    def __enter__(self) -> Step:
        self._closures.compute_again = self._evaluate
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            if error is None and self._compute_loss_again is None and self._given is None:
                self._engine.end_passes()
                raise RuntimeError(
                    f"an optimizer that takes a closure requests the loss again, but step "
                    f"{self.number} does not say how to compute it: call "
                    f"`step.again(lambda batch: loss(model, batch))` within the block."
                )
            return super().__exit__(kind, error, traceback)
        finally:
            self._closures.compute_again = None

    def _evaluate(self) -> None:
        """Compute all shards again. Collective."""
        self._begin()
        for batch in self.shards:
            if self._compute_loss_again is not None:
                self.backward(self._compute_loss_again(batch))
            else:
                assert self._given is not None
                self.backward(self._given(self._engine.model, batch))


def _together(before: StepMeans | None, means: StepMeans) -> StepMeans:
    """Return the means over the updates of the same optimizers, `before` and this one."""
    if before is None:
        return means
    sums = dict(before.sums)
    for name, (total, weight) in means.sums.items():
        more, their = sums.get(name, (0.0, 0.0))
        sums[name] = more + total, None if weight is None else (their or 0.0) + weight
    return StepMeans(sums)


class _UndoneError(BaseException):
    """A worker was lost in an update; not an Exception, so that the program does not catch it."""


@final
class AlternatingStep(Step):
    """A :class:`Step` of several optimizers, some of which it may update separately."""

    def __init__(
        self, boundary: Boundary, plan: SamplePlan, loader: Loader, position: Position
    ) -> None:
        super().__init__(boundary, plan, loader, position)
        self._turn = 0  # number of updates so far
        self._updating: tuple[str, ...] = ()
        self._means_of: dict[str, StepMeans] = {}
        self._loss = 0.0  # the sum over updates
        self._batches_read: dict[int, Any] = {}  # for all updates, by shard

    @contextlib.contextmanager
    @override
    def update(
        self, *names: str, gradients: Mapping[str, torch.Tensor] | None = None
    ) -> Iterator[Step]:
        check_optimizer_names(self._engine.optimizers, names)
        if not self._entered or self._updating or (self._taken and not self._turn):
            raise RuntimeError(
                f"`step.update` must be used within `with step:`, one block after another, without "
                f"a loop over `step.shards` outside of them; in step {self.number} it was not."
            )
        if self._turn:
            self._begin()
        self._engine.begin_update([self._engine.optimizers[name] for name in names], self._turn)
        self._turn, self._updating = self._turn + 1, names
        self.is_done = self._is_finished = False
        try:
            if gradients is not None:
                self._use_gradients(gradients)
            yield self
        except BaseException as error:
            self._end_update(error)
            raise
        self._end_update(None)
        if not self.is_done:
            raise _UndoneError
        name = "+".join(names)
        if gradients is None or name not in self._means_of:  # given gradients have no loss
            self._means_of[name] = _together(self._means_of.get(name), self.means)
        self._loss += self.means["loss"]

    def _end_update(self, error: BaseException | None) -> None:
        self._engine.end_passes()
        try:
            super()._finish(error)
        except NonFiniteLossError as raised:
            if self._turn > 1:
                raised.add_note(f"This was {self._in_step()}; updates of the step before it stay.")
            raise
        finally:
            self._updating = ()
            self._taken = True  # until the next update

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if isinstance(error, _UndoneError):
            self._engine.end_passes()
            self._show_undone()
            return True
        return super().__exit__(kind, error, traceback)

    def _finish(self, error: BaseException | None) -> None:
        """End the step; its updates are already done."""
        if not self._turn:
            super()._finish(error)
        elif error is None and self.is_done:
            named = self._means_of.items()
            every = {f"{name}.{key}": pair for name, of in named for key, pair in of.sums.items()}
            self.means = StepMeans({"loss": (self._loss, 1.0), **every})

    def _read(self, shard: int) -> Any:
        if not self._updating:
            return super()._read(shard)
        if shard not in self._batches_read:
            self._batches_read[shard] = super()._read(shard)
        return self._batches_read[shard]

    def _in_step(self) -> str:
        of = f", in the update of {'+'.join(self._updating)}" if self._updating else ""
        return f"{super()._in_step()}{of}"

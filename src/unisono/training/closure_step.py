"""A step whose shards are computed as often as the optimizer asks for the loss."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from unisono.data.loader import Loader
from unisono.engine.state.run_state import Position
from unisono.engine.step.closure_engine import ClosureEngine
from unisono.plan.samples import SamplePlan
from unisono.training.boundary import Boundary
from unisono.training.step import Step


class ClosureStep(Step):
    """A :class:`Step` of an optimizer that takes a closure. Final."""

    def __init__(
        self, boundary: Boundary, plan: SamplePlan, loader: Loader, position: Position
    ) -> None:
        super().__init__(boundary, plan, loader, position)
        assert isinstance(self._engine, ClosureEngine)
        self._closures: ClosureEngine = self._engine
        self._given = boundary.run.loss
        self._compute_loss_again: Callable[[Any], Any] | None = None

    def again(self, loss: Callable[[Any], Any]) -> None:
        """See :class:`Step`."""
        if not callable(loss):
            raise TypeError(
                f"`step.again` takes a function that computes a batch's loss, but is given a "
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
    ) -> bool:
        try:
            if error is None and self._compute_loss_again is None and self._given is None:
                self._engine.end_passes()
                raise RuntimeError(
                    f"an optimizer that takes a closure asks for the loss again, but in step "
                    f"{self.number} nobody has said how it is computed: call "
                    f"`step.again(lambda batch: loss(model, batch))` within the block."
                )
            return super().__exit__(kind, error, traceback)
        finally:
            self._closures.compute_again = None

    def _evaluate(self) -> None:
        """Compute all shards once more. Collective."""
        self._begin()
        for batch in self.shards:
            self.backward(self._loss_of(batch))

    def _loss_of(self, batch: Any) -> Any:
        if self._compute_loss_again is not None:
            return self._compute_loss_again(batch)
        assert self._given is not None
        return self._given(self._engine.model, batch)

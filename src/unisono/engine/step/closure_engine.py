"""Steps of optimizers that request the loss again: LBFGS, SAM, and any other that takes a closure.

::

    shards ── sum ── optimizer.step(closure)
                         │  closure: the same shards, with the parameters as they are now ── sum
                         └─ … as often as the optimizer requests

Every worker has a replica and calls the optimizer with the same sums, so all request the loss
equally often and compute the same bits. Each evaluation seeds generators as the first one does;
buffers carry over from evaluation to evaluation, as in a loop of one process. The shards of a lost
worker are computed by the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from typing_extensions import override

from unisono.engine.step.engine import StepEngine
from unisono.engine.step.records import StepMeans
from unisono.errors import NonFiniteLossError
from unisono.runtime.forbidden import IN_AN_UPDATE, forbid


@final
class ClosureEngine(StepEngine):
    """Computes the steps of one loop, with the arguments of :class:`StepEngine`.

    `compute_again` computes all shards of the step once more, a collective; the step sets it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_again: Callable[[], None] | None = None
        self._gradients: list[torch.Tensor | None] = []
        self._loss = torch.zeros(())
        self._versions: list[int] = []
        self._values: list[torch.Tensor] = []  # writes through `.data` leave versions as they are
        self._num_evaluations = 0

    @override
    def finish(self) -> tuple[StepMeans, bool]:
        """Return the means of the first evaluation."""
        means = self._take_gradients()
        self._meet_fault("update", self.sums.step)
        before = forbid(IN_AN_UPDATE)
        optimizer: Any = self._optimizer  # torch's annotation says that a closure gives a float
        values = [*self.exchange.parameters, *self.exchange.buffers.values().values()]
        noted = [value.detach().clone() for value in values]
        self._num_evaluations = 0
        self.passes.seed("update")
        self.exchange.buffers.settle()
        try:
            optimizer.step(self._closure)
        except NonFiniteLossError:
            with torch.no_grad():
                torch._foreach_copy_(values, noted)
            raise
        finally:
            forbid(before)
            self._values = []
            self.guard.clear_gradients()
        return means, self._settle()

    def _closure(self) -> torch.Tensor:
        """Return the mean loss for the present parameters, and set their `.grad`."""
        exchange = self.exchange
        parameters = exchange.parameters
        if self._versions != [parameter._version for parameter in parameters] or not all(
            map(torch.equal, self._values, parameters)
        ):
            exchange.share(f"evaluation in step {self.sums.step}")
            self.passes.commit()
            self.guard.remember()
            self.begin_again()
            assert self.compute_again is not None
            with torch.enable_grad():
                self.compute_again()
            self._take_gradients()
            self._num_evaluations += 1
            self.passes.seed("update", self._num_evaluations)
            forbid(IN_AN_UPDATE)
        self._put_gradients()
        return self._loss.clone()

    def _take_gradients(self) -> StepMeans:
        """Sum the gradients of the finished passes; return the means. Collective."""
        means, is_whole = self._sum()
        assert is_whole  # no worker has state that the others lack
        exchange = self.exchange
        sums = zip(exchange.whole, self.sums.present, strict=True)
        # Copies: the optimizer may change them, and ask for the same again.
        self._gradients = [total.clone() if is_there else None for total, is_there in sums]
        self._loss = torch.tensor(means["loss"], dtype=torch.float64)
        self._versions = [parameter._version for parameter in exchange.parameters]
        self._values = [parameter.detach().clone() for parameter in exchange.parameters]
        self._put_gradients()
        return means

    def _put_gradients(self) -> None:
        pairs = zip(self.exchange.parameters, self._gradients, strict=True)
        for parameter, gradient in pairs:
            parameter.grad = None if gradient is None else gradient.clone()

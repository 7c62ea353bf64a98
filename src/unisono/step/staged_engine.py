"""Steps of a model that is cut into stages: each worker computes one of them.

::

    each shard      seed → buffers back → forward pass, with values from and to other stages
    when due        the oldest shard in flight: backward pass → add the stage's own to a part
    publish         what is this stage's of finished parts; the last stage the shards' records

From `gather` on all is as ever (``engine.py``). But nobody else can compute a stage: whoever is
lost in the midst of a step takes that step along, and it begins anew with a replacement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.exchange.protocol import Exchange
from unisono.plan.pipeline import num_due
from unisono.stages.flight import Flight
from unisono.stages.pipe import ReplicaBrokenError
from unisono.stages.stage_worker import StageWorker
from unisono.step.engine import StepEngine
from unisono.step.loss import check_differentiable, is_known_bad, read_loss
from unisono.step.phase_timers import Phase


@dataclass(slots=True)
class _Landed:
    """A shard whose backward pass is still to come."""

    shard: int  # which one
    flight: Flight | None  # its values from and to other stages; None: it has no samples
    # what is to be differentiated beside those: the loss, on the last stage
    roots: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)  # likewise
    is_bad: bool = False  # whether the loss is not finite
    buffers: torch.Tensor | None = None  # as its forward pass has left them, if others may follow
    # which buffers this stage publishes, by position; for the first shard alone
    published: frozenset[int] = frozenset()


class StagedEngine(StepEngine):
    """Computes the steps of one loop on one stage. Final; arguments as of :class:`StepEngine`."""

    is_staged = True

    def __init__(self, *args: Any, stages: StageWorker, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stages = stages
        self._landed: deque[_Landed] = deque()
        self._is_in_passes = False
        exchange: Exchange = self.exchange
        exchange.of_stage = [
            index
            for index, parameter in enumerate(exchange.parameters)
            if stages.stage_of[id(parameter)] == self._team.stage
        ]

    @property
    def stages(self) -> StageWorker:
        """This worker's stage."""
        return self._stages

    def watched(self) -> AbstractContextManager[None]:
        """See :class:`StepEngine`."""
        return self._stages.entered()

    def begin(self, step: int, first_shard: int) -> None:
        """See :class:`StepEngine`."""
        super().begin(step, first_shard)
        self._landed.clear()

    def begin_passes(self, sizes: Sequence[int]) -> Sequence[int]:
        """See :class:`StepEngine`; raises ReplicaBrokenError if somebody was lost."""
        if not self._team.can_compute:
            raise ReplicaBrokenError
        self._stages.begin()
        self._is_in_passes = True
        return super().begin_passes(sizes)

    def start_shard(self, shard: int) -> nn.Module:
        """See :class:`StepEngine`."""
        model = super().start_shard(shard)
        self._flight = self._stages.start(shard)
        return model

    def finish_shard(self, shard: int, returned: Any, num_samples: int, share: float) -> None:
        """See :class:`StepEngine`; backward passes are made that are due."""
        returned = self._stages.land(returned)
        self.timers.lap(Phase.FORWARD)
        self._bound.check_gradients()
        landed = _Landed(shard, self._flight)
        buffers = self.exchange.buffers
        if shard == self._first_shard:
            landed.published = buffers.which(self._stages.publishes)
        buffers.take_back(lambda buffer: not buffer.is_meta)
        if self._stages.limit > 1:
            landed.buffers = buffers.noted()
        if self._stages.is_last:
            self._take_loss(landed, returned, num_samples, share)
        self._landed.append(landed)
        self._differentiate_due(is_last=False)
        self._bound.set_placeholders()

    def skip_shard(self, shard: int) -> None:
        """See :class:`StepEngine`."""
        if self._team.stage == 0:
            self._records.write(shard, None)
        self._landed.append(_Landed(shard, None))
        self._differentiate_due(is_last=False)

    def arrive(self) -> list[int] | None:
        """See :class:`StepEngine`; raises ReplicaBrokenError if somebody was lost."""
        self._differentiate_due(is_last=True)
        self._stages.finish()
        self._is_in_passes = False
        if super().arrive() is not None:
            raise ReplicaBrokenError
        return None

    def abandon(self) -> None:
        """Leave a step in which somebody was lost. Collective."""
        if self._is_in_passes:  # the others miss it there
            self.exchange.gather(f"gradients of step {self._step}")
        self._is_in_passes = False
        self._landed.clear()
        self.passes.home.stack.discard()
        super().abandon()

    def _take_loss(self, landed: _Landed, returned: Any, num_samples: int, share: float) -> None:
        """Take the loss of a shard, on the last stage."""
        loss = read_loss(returned, num_samples)
        self._records.write(landed.shard, loss)
        if self._scaling is None and is_known_bad(loss):
            landed.is_bad = True
            return
        check_differentiable(loss)
        tensor, weight = self._weighted(loss, share)
        landed.roots.append(tensor)
        landed.gradients.append(weight)

    def _differentiate_due(self, *, is_last: bool) -> None:
        num_open = sum(landed.flight is not None for landed in self._landed)
        due = num_due(num_open, self._stages.limit, is_last=is_last)
        while self._landed and (due or self._landed[0].flight is None):
            landed = self._landed.popleft()
            if landed.flight is None:
                self._publish(self.passes.home.stack.push_nothing(landed.shard))
                continue
            due -= 1
            self._differentiate_one(landed, landed.flight)
        self.timers.lap(Phase.BACKWARD)

    def _differentiate_one(self, landed: _Landed, flight: Flight) -> None:
        self._team.faults.meet("backward", self._step)
        buffers = self.exchange.buffers
        buffers.set_to(landed.buffers)
        self._bound.remove_placeholders()
        if landed.is_bad:
            flight.skip()
            is_made = False
        else:
            is_made = self._stages.differentiate(flight, landed.roots, landed.gradients)
        pushed = self.passes.home.stack.push(landed.shard) if is_made else None
        self._publish(pushed if is_made else self.passes.home.stack.push_nothing(landed.shard))
        self._bound.clear_fixed()
        if landed.published:
            buffers.keep_some(landed.published)
        self._bound.set_placeholders()

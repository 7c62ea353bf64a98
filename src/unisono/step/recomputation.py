"""Compute parts of a step once more and show nobody the gradients: for audits.

A part that is computed again goes through the same passes in the same order: seeded as the first
time, from the same buffers, added up in the same tree. So it has the same bits, on whichever
worker, or somebody has computed it wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unisono.exchange.arena import ROW_BYTES
from unisono.exchange.protocol import Exchange
from unisono.plan.summation import Node
from unisono.state.digest import checksum_of
from unisono.step.bound_model import BoundModel
from unisono.step.gradients import GradientStack
from unisono.step.loss import check_differentiable, is_known_bad, read_loss
from unisono.step.phase_timers import Phase, PhaseTimers
from unisono.step.records import Records
from unisono.step.scaling import LossScaling

Digests = dict[str, str]
_NONE = "none"


class Recomputation:
    """Computes some parts of the step under way again. Final; for one step.

    Args:
        scaling: how losses are scaled; None: not at all.
        parts: what is computed again.
        first_shard: the first one that has samples in this step.

    Attributes:
        digests: of each part that is done, by its first shard: what it consists of, by name.
    """

    def __init__(
        self,
        exchange: Exchange,
        bound: BoundModel,
        scaling: LossScaling | None,
        timers: PhaseTimers,
        parts: Sequence[Node],
        first_shard: int,
    ) -> None:
        self._exchange, self._bound, self._scaling = exchange, bound, scaling
        self._timers, self._first_shard = timers, first_shard
        self.parts = parts
        self._stack = GradientStack(exchange.parameters, parts)
        rows = bytearray(ROW_BYTES * exchange.division.num_shards)
        self._rows = [
            memoryview(rows)[start : start + ROW_BYTES] for start in range(0, len(rows), ROW_BYTES)
        ]
        self._buffers: Digests = {}
        self.digests: dict[int, Digests] = {}

    def finish_shard(self, shard: int, returned: Any, num_samples: int, share: float) -> None:
        """Differentiate one shard's loss; arguments and errors as of `StepEngine.finish_shard`."""
        self._timers.lap(Phase.FORWARD)
        loss = read_loss(returned, num_samples)
        self._bound.check_gradients()
        Records(self._rows).write(shard, replace(loss, scalars=dict(loss.numbers())))
        if self._scaling is None and is_known_bad(loss):
            self._take(self._stack.push_nothing(shard))
        else:
            check_differentiable(loss)
            weight = 1.0 if loss.is_sum else share
            tensor = loss.tensor if self._scaling is None else self._scaling.scaled(loss.tensor)
            self._exchange.device.backward(tensor, torch.full_like(tensor, weight))
            finished = self._stack.push(shard)
            self._bound.clear_fixed()
            if shard == self._first_shard:
                self._buffers = _of_buffers(self._exchange.buffers.values())
            self._take(finished)
            self._bound.set_placeholders()
        self._timers.lap(Phase.BACKWARD)

    def skip_shard(self, shard: int) -> None:
        """Take into account that a shard has no samples in this step."""
        Records(self._rows).write(shard, None)
        self._take(self._stack.push_nothing(shard))

    def _take(self, finished: tuple[Node, Sequence[torch.Tensor | None]] | None) -> None:
        if finished is not None:
            part, gradients = finished
            digests = _of_gradients(self._exchange, gradients)
            digests |= _of_records(self._rows, part)
            if self._first_shard in range(part.lo, part.hi):
                digests |= self._buffers
            self.digests[part.lo] = digests


def published_digests(
    exchange: Exchange, parts: Sequence[Node], first_shard: int
) -> list[tuple[int, Digests]]:
    """Sum up what this worker has published, once all have met and before anybody adds it up.

    Args:
        parts: this worker's.
        first_shard: the first one that has samples in this step.

    Returns:
        The first shard of each part, with what it consists of by name; several times where others
        read another copy than this worker.
    """
    found = []
    for part in parts:
        beside = _of_records(exchange.memory.arena.rows, part)
        if first_shard in range(part.lo, part.hi):
            beside |= _of_buffers(exchange.buffers.kept())
        for gradients in exchange.published(part):
            found.append((part.lo, _of_gradients(exchange, gradients) | beside))
    return found


def _of_gradients(exchange: Exchange, gradients: Sequence[torch.Tensor | None]) -> Digests:
    slots = exchange.memory.arena.plan.parameters
    return {
        f"gradient of `{slot.name}`": _NONE if gradient is None else checksum_of(gradient)
        for slot, gradient in zip(slots, gradients, strict=True)
    }


def _of_buffers(buffers: dict[str, torch.Tensor]) -> Digests:
    return {f"buffer `{name}`": checksum_of(buffer) for name, buffer in buffers.items()}


def _of_records(rows: Sequence[memoryview], part: Node) -> Digests:
    records = Records(rows[part.lo : part.hi]).read()
    return {f"loss of shard {part.lo + at}": repr(record) for at, record in enumerate(records)}

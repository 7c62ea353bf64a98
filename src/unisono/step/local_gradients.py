"""The gradients of groups of shards that each update parameters of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from unisono.exchange.local_steps import LocalGroup, LocalSteps
from unisono.exchange.protocol import Exchange
from unisono.step.clipping import Clipping, total_norm
from unisono.step.records import Form, Record, Records


class LocalGradients:
    """Weighs and clips this worker's pieces of them. Final."""

    def __init__(self, exchange: Exchange, local: LocalSteps) -> None:
        self._exchange, self._local = exchange, local

    def weigh(
        self, form: Form, records: Records, read: Sequence[Record], sizes: Sequence[int]
    ) -> None:
        """Turn sums that count for the global batch into means over each group's samples.

        Args:
            form: of the losses.
            records: reads those of shards.
            read: of all shards.
            sizes: how many samples each shard has.
        """
        for group in self._local.groups:
            own = [read[shard] for shard in group.shards]
            if all(record.form == Form.EMPTY for record in own):
                continue
            weight = sum(sizes[shard] for shard in group.shards) / sum(sizes)
            if form == Form.SUM:
                weight = records.totals(own).weight
            if sums := self._sums(group):
                torch._foreach_div_(sums, weight)

    def clip(self, clipping: Clipping, purpose: str) -> float | None:
        """Clip each group's gradients by their own norm. Collective.

        Returns:
            The largest norm of all groups; not finite if one is not: then nothing was clipped. None
            if somebody was lost.
        """
        if clipping.value is not None:
            for group in self._local.groups:
                clipping.clip_values(self._sums(group))
        if clipping.norm is None:
            return 0.0
        if not self._exchange.all_sums(purpose):
            return None
        norms = [
            total_norm([sums for _, sums in self.whole(group)]) for group in self._local.groups
        ]
        told = json.dumps([norm.item() for norm in norms]).encode()
        heard = self._exchange.agree(told, purpose)
        if heard is None:
            return None
        largest = max((norm for one in heard for norm in json.loads(one)), key=_nan_first)
        if largest - largest == 0:
            for group, norm in zip(self._local.groups, norms, strict=True):
                clipping.scale(self._sums(group), norm)
        return float(largest)

    def whole(self, group: LocalGroup) -> Iterator[tuple[int, torch.Tensor]]:
        """Give the whole sums of a group, by the parameter, where there are any."""
        sums = self._exchange.memory.arena.gradients[group.shards.start].tensors()
        there = self._local.present(group)
        return ((at, one) for at, one in enumerate(sums) if there[at])

    def non_finite(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Give the whole sums of all groups of this host."""
        return (pair for group in self._local.groups for pair in self.whole(group))

    def _sums(self, group: LocalGroup) -> list[torch.Tensor]:
        """View this worker's pieces of a group's sums; see :meth:`StepEngine._totals`."""
        exchange, there = self._exchange, self._local.present(group)
        return [
            total if exchange.parameters[piece.index].ndim else total.view(())
            for total, piece in zip(group.totals, exchange.pieces, strict=True)
            if there[piece.index]
        ]


def _nan_first(norm: float) -> float:
    return norm if norm == norm else float("inf")

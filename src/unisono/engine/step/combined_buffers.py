"""Buffers whose value after a step depends on all shards: a running count, an average.

Each shard starts from the step's value, as for every buffer. The values that shards leave are
gathered once all are done, and combined in tree order, in the buffer's dtype::

    sum     start + (shard 0 − start) + (shard 1 − start) + …       counts, sums
    mean    start + n₀/n (shard 0 − start) + n₁/n (shard 1 − start) + …     averages over samples
    max, min    of all shards                                       observers of ranges
    first   the value that the first shard with samples leaves, as for any other buffer

A step that one shard computes has that shard's bits, those of a plain loop.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import nn

from unisono.engine.exchange.buffers import Buffers
from unisono.plan.summation import tree_sum
from unisono.runtime.device import on_host

FIRST, SUM, MEAN, MAX, MIN = WAYS = ("first", "sum", "mean", "max", "min")
_EXTREMES = {MAX: torch.maximum, MIN: torch.minimum}


def ways_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """Return how each named buffer is combined; names may be patterns. Raises ValueError."""
    named, ways = dict(model.named_buffers()), dict[str, str]()
    for pattern, way in (given or {}).items():
        names = fnmatch.filter(named, pattern)
        if way not in WAYS:
            raise ValueError(
                f"`buffers` must combine in one of {WAYS}, but is {way!r} for {pattern!r}."
            )
        if not names:
            raise ValueError(
                f"`buffers` must name buffers of the model, such as those of "
                f"`model.named_buffers()`, but {pattern!r} is none of {sorted(named)}."
            )
        for name in names:
            _check_kind(name, named[name], way)
        ways |= dict.fromkeys(names, way)
    return ways


def _check_kind(name: str, buffer: torch.Tensor, way: str) -> None:
    is_number = buffer.is_floating_point() or buffer.is_complex()
    if (way == MEAN and not is_number) or (way == SUM and buffer.dtype == torch.bool):
        instead = MAX if buffer.dtype == torch.bool else SUM
        raise ValueError(
            f'`buffers` must be "{instead}", "first" or another one that fits {buffer.dtype} for '
            f"`{name}`, but is {way!r}."
        )


def combined(
    way: str,
    start: torch.Tensor,
    left: Mapping[int, torch.Tensor],
    sizes: Sequence[int],
) -> torch.Tensor:
    """Combine the values that shards have `left`, by shard; `sizes` are their sample counts."""
    if len(left) == 1:
        return next(iter(left.values()))
    if way in _EXTREMES:
        return functools.reduce(_EXTREMES[way], left.values())
    changes: list[torch.Tensor | None] = [None] * len(sizes)
    for shard, value in left.items():
        changes[shard] = value - start
        if way == MEAN:
            changes[shard] = (value - start) * (sizes[shard] / sum(sizes))
    total = tree_sum(changes, lambda a, b: b if a is None else a if b is None else a + b)
    assert total is not None
    return start + total


@final
class CombinedBuffers:
    """The combined buffers of one loop, in one update of a step.

    Attributes:
        left: by shard computed here, its values on the host, in the order of `ways`.
    """

    def __init__(self, buffers: Buffers, ways: Mapping[str, str]) -> None:
        self._buffers = buffers
        self._ways = {name: way for name, way in ways.items() if way != FIRST}
        self.left: dict[int, list[torch.Tensor]] = {}

    def take(self, shard: int) -> None:
        """Record the values that a shard's passes left; waits for an accelerator."""
        now = self._buffers.values()
        self.left[shard] = [on_host(now[name]).clone() for name in self._ways]

    def finish(self, left: Mapping[int, Sequence[torch.Tensor]], sizes: Sequence[int]) -> None:
        """Set the combined values of all shards, on every worker alike."""
        made = {}
        for at, (name, way) in enumerate(self._ways.items()):
            each = {shard: left[shard][at] for shard in sorted(left)}
            made[name] = combined(way, self._buffers.started(name), each, sizes)
        self._buffers.amend(made)

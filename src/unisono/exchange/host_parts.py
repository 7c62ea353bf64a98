"""The parts of whole hosts: each the sum of a maximal sub-tree of shards inside of one host.

::

    worker 0 of the host   shards 0 1   part [0, 2) ┐
    worker 1               shards 2 3   part [2, 4) ┴─► part [0, 4) of the host

Each worker of a host adds up its pieces of them, in the arena, where the first part of each was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.exchange.arena import Arena
from unisono.exchange.block import Bytes
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import Parts, presence
from unisono.plan.rounds import as_whole, within
from unisono.plan.slices import Piece
from unisono.plan.summation import Node


class HostParts:
    """Makes the parts of this host of its workers' parts, as one of these workers. Final.

    Args:
        arena: where its workers' parts are.
        held: the parts of each host, which are to be made.
        host: which one this is.
        parts: those of all workers.
        pieces: what this worker adds up.

    Attributes:
        flags: per shard, which parameters the host's part that begins there has gradients for.
        present: for each parameter, whether any shard had a gradient for it.
    """

    def __init__(
        self,
        arena: Arena,
        held: Sequence[Sequence[Node]],
        host: int,
        parts: Sequence[Node],
        pieces: Sequence[Piece],
    ) -> None:
        self._arena = arena
        self._within = [(part, within(part, parts)) for ours in held for part in ours]
        self._sums = [
            OrderedSum(
                _FromZero(arena, part.lo),
                as_whole(part, within(part, parts)),
                part.hi - part.lo,
                pieces,
            )
            for part in held[host]
        ]
        num_flags = len(arena.plan.parameters) + 1
        self.flags = [memoryview(bytearray(num_flags)) for _ in range(arena.plan.shards)]
        self.present: tuple[bool, ...] = ()

    def memory(self, lo: int) -> Bytes:
        """Give the bytes of the part that begins with shard `lo`."""
        return _BytesFrom(self._arena.memory, self._arena.gradients[lo].start)

    def add_up(self) -> None:
        """Add up this worker's pieces, once the flags of all workers' parts are here."""
        for own in self._sums:
            own.add()
        everywhere = [False] * len(self._arena.plan.parameters)
        for part, parts in self._within:
            rows = [presence(bytes(self._arena.flags[one.lo])) for one in parts]
            there = [any(column) for column in zip(*rows, strict=True)]
            self.flags[part.lo][:] = bytes([0, *there])
            everywhere = [a or b for a, b in zip(everywhere, there, strict=True)]
        self.present = tuple(everywhere)


class _FromZero:
    """Published parts, with the shards numbered from another one on. Final."""

    def __init__(self, arena: Arena, first: int) -> None:
        self._parts, self._first = Parts(arena), first

    def flags(self, lo: int) -> bytes:
        return self._parts.flags(lo + self._first)

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return self._parts.views(lo + self._first, pieces)


class _BytesFrom:
    """A memory's bytes, counted from one of them. Final."""

    def __init__(self, memory: Bytes, start: int) -> None:
        self._memory, self._start = memory, start

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None
    ) -> torch.Tensor:
        return self._memory.tensor(self._start + offset, shape, dtype, stride)

    def flat(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory.flat(self._start + offset, numel, dtype)

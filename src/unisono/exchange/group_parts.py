"""The sums of whole groups of shards, of the parts that workers of this host have published.

::

    worker 0 of the host   shards 0 1 2   parts [0, 2) [2, 3) ┐
    worker 1               shards 3       part [3, 4)         ┴─► group [0, 4)

Each worker of a host adds up its pieces of them, in the arena, where the first part of each was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.exchange.arena import Arena
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import Parts, presence
from unisono.plan.rounds import as_whole, within
from unisono.plan.slices import Piece
from unisono.plan.summation import Node


class GroupParts:
    """Makes the sums of this host's groups, as one of its workers. Final.

    Args:
        arena: where parts are.
        groups: of all hosts.
        own: those of this host, which are to be made.
        parts: those of all workers.
        pieces: what this worker adds up.

    Attributes:
        flags: by its first shard, which parameters a group has gradients for.
        present: for each parameter, whether any shard had a gradient for it.
    """

    def __init__(
        self,
        arena: Arena,
        groups: Sequence[Node],
        own: Sequence[Node],
        parts: Sequence[Node],
        pieces: Sequence[Piece],
    ) -> None:
        self._arena = arena
        self._within = [(group, within(group, parts)) for group in groups]
        self._sums = [
            OrderedSum(
                _FromZero(arena, group.lo),
                as_whole(group, within(group, parts)),
                group.hi - group.lo,
                pieces,
            )
            for group in own
        ]
        self.flags: dict[int, bytes] = {}
        self.present: tuple[bool, ...] = ()

    def add_up(self) -> None:
        """Add up this worker's pieces, once the flags of all workers' parts are here."""
        for own in self._sums:
            own.add()
        there = [[False] * len(self._arena.plan.parameters)]
        for group, parts in self._within:
            rows = [presence(bytes(self._arena.flags[one.lo])) for one in parts]
            there.append([any(column) for column in zip(*rows, strict=True)])
            self.flags[group.lo] = bytes([0, *there[-1]])
        self.present = tuple(any(column) for column in zip(*there, strict=True))


class _FromZero:
    """Published parts, with the shards numbered from another one on. Final."""

    def __init__(self, arena: Arena, first: int) -> None:
        self._parts, self._first = Parts(arena), first

    def flags(self, lo: int) -> bytes:
        return self._parts.flags(lo + self._first)

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return self._parts.views(lo + self._first, pieces)

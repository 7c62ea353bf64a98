"""The sum of all parts in tree order, over some pieces of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from unisono.device import by_device
from unisono.exchange.parts import PublishedParts, presence
from unisono.plan.slices import Piece
from unisono.plan.summation import Node, additions_over, as_whole, tree_sum

_PROGRAMS_AT_MOST = 256
_Vectors = Sequence[torch.Tensor]
_Act = tuple[Callable[..., object], list[torch.Tensor], list[torch.Tensor]]


class OrderedSum:
    """Finishes the tree over some pieces. Final.

    Args:
        parts: together they are every shard, or every one of a sub-tree, once.
        pieces: what is added up here.
        into: where the sums go, as vectors; then the parts stay as they are. None: into the slots
            of the parts (the whole sum into that of the first shard), of which nobody else reads
            these pieces.

    Attributes:
        pieces: what is added up here.
        totals: the sums over `pieces`, as vectors.
        num_bytes: what sums take that are neither in parts nor in `into`.
    """

    def __init__(
        self,
        published: PublishedParts,
        parts: Sequence[Node],
        pieces: Sequence[Piece],
        into: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._published, self.pieces = published, pieces
        self._slots = [part.lo for part in parts]
        whole = Node(min(self._slots), max(part.hi for part in parts))
        self._parts = tuple(as_whole(whole, parts))
        self._views = [published.views(lo, pieces) for lo in self._slots]
        first = self._slots.index(whole.lo)
        written = {first} | {into for into, _ in additions_over(whole.hi - whole.lo, self._parts)}
        self._sums: list[Sequence[torch.Tensor]] = [
            views if into is None or at not in written else list(map(torch.empty_like, views))
            for at, views in enumerate(self._views)
        ]
        if into is not None:
            self._sums[first] = into
        self.totals = self._sums[first]
        self.num_bytes = sum(
            vector.nbytes
            for views, sums in zip(self._views, self._sums, strict=True)
            if sums is not views and sums is not into
            for vector in sums
        )
        self._programs: dict[tuple[bytes, ...], _Program] = {}

    def add(self) -> tuple[bool, ...]:
        """Add up what has been published.

        Returns:
            For each parameter, whether any shard had a gradient for it; only then are its totals
            defined.
        """
        flags = tuple(map(self._published.flags, self._slots))
        program = self._programs.get(flags)
        if program is None:
            if len(self._programs) >= _PROGRAMS_AT_MOST:
                self._programs.clear()
            program = self._programs[flags] = self._compile(flags)
        for act, into, other in program.actions:
            act(into, other)
        return program.present

    def _compile(self, flags: tuple[bytes, ...]) -> _Program:
        """Work out what to do when the parts have gradients for just these parameters."""
        actions: list[_Act] = []

        def act(what: Callable[..., object], into: _Vectors, other: _Vectors, on: set[int]) -> None:
            positions = [n for n, piece in enumerate(self.pieces) if piece.index in on]
            some = [[vectors[n] for n in positions] for vectors in (into, other)]
            actions.extend((what, *lists) for lists in by_device(*some))

        def add(one: _Sum, other: _Sum) -> _Sum:
            act(torch._foreach_add_, one.vectors, other.vectors, one.present & other.present)
            act(torch._foreach_copy_, one.vectors, other.vectors, other.present - one.present)
            return _Sum(one.vectors, one.present | other.present)

        values = []
        for views, sums, row in zip(self._views, self._sums, flags, strict=True):
            present = {index for index, there in enumerate(presence(row)) if there}
            if sums is not views:
                act(torch._foreach_copy_, sums, views, present)
            values.append(_Sum(sums, present))
        total = tree_sum(values, add, self._parts)
        is_present = tuple(index in total.present for index in range(len(flags[0]) - 1))
        return _Program(tuple(actions), is_present)


class _Sum(NamedTuple):
    """Where the sum of some shards is, and which parameters any of them had a gradient for."""

    vectors: _Vectors
    present: set[int]


@dataclass(frozen=True, slots=True)
class _Program:
    """The additions of one pattern of gradients: add where both sides have one, else take over."""

    actions: tuple[_Act, ...]
    present: tuple[bool, ...]

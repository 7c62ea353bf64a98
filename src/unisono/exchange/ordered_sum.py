"""The sum of all parts in tree order, over some pieces of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.exchange.parts import Published, presence
from unisono.plan.slices import Piece
from unisono.plan.summation import Node, additions_over

_PROGRAMS_AT_MOST = 256


class OrderedSum:
    """Finishes the tree over some pieces. Final.

    Args:
        published: where the parts are.
        parts: those of all workers; together they are every shard once.
        num_shards: S.
        pieces: what is added up here.
        in_place: whether the sums go into the slot of shard 0, of which nobody else reads these
            pieces; else they go into memory of their own, and the parts stay as they are.

    Attributes:
        pieces: what is added up here.
        totals: the sums over `pieces`, as vectors.
    """

    def __init__(
        self,
        published: Published,
        parts: Sequence[Node],
        num_shards: int,
        pieces: Sequence[Piece],
        *,
        in_place: bool,
    ) -> None:
        self._published = published
        self._parts = [part.lo for part in parts]
        self.pieces = pieces
        self._additions = additions_over(parts, num_shards)
        self._views = {lo: published.views(lo, pieces) for lo in self._parts}
        written = {into for into, _ in self._additions} | {0}
        self._sums = {
            lo: views if in_place or lo not in written else list(map(torch.empty_like, views))
            for lo, views in self._views.items()
        }
        self._is_copied = {lo: self._sums[lo] is not self._views[lo] for lo in self._parts}
        self.totals = self._sums[0]
        self._programs: dict[tuple[bytes, ...], _Program] = {}

    def add(self) -> tuple[bool, ...]:
        """Add up what has been published.

        Returns:
            For each parameter, whether any shard had a gradient for it; only then are its totals
            defined.
        """
        flags = tuple(map(self._published.flags, self._parts))
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
        present = {lo: presence(row) for lo, row in zip(self._parts, flags, strict=True)}
        actions = [
            self._act(torch._foreach_copy_, self._sums[lo], self._views[lo], present[lo])
            for lo in self._parts
            if self._is_copied[lo]
        ]
        for into, other in self._additions:
            here, there = present[into], present[other]
            both = [a and b for a, b in zip(here, there, strict=True)]
            alone = [b and not a for a, b in zip(here, there, strict=True)]
            sums, more = self._sums[into], self._sums[other]
            actions.append(self._act(torch._foreach_add_, sums, more, both))
            actions.append(self._act(torch._foreach_copy_, sums, more, alone))
            present[into] = [a or b for a, b in zip(here, there, strict=True)]
        return _Program(tuple(act for act in actions if act[1]), tuple(present[0]))

    def _act(
        self,
        act: Callable[..., object],
        into: Sequence[torch.Tensor],
        other: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> _Act:
        positions = [n for n, piece in enumerate(self.pieces) if wanted[piece.index]]
        return act, [into[n] for n in positions], [other[n] for n in positions]


_Act = tuple[Callable[..., object], list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Program:
    """The additions of one pattern of gradients: add where both sides have one, else take over."""

    actions: tuple[_Act, ...]
    present: tuple[bool, ...]

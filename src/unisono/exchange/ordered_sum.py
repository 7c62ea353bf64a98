"""The ordered sum of all parts, each worker over its own pieces of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.exchange.arena import Arena
from unisono.plan.slices import Piece
from unisono.plan.summation import Node, additions_over
from unisono.step.gradients import ABSENT, COMPLETE

_PROGRAMS_AT_MOST = 256


class OrderedSum:
    """Adds the parts into slot 0, in tree order, over one worker's pieces. Final.

    Args:
        arena: where the parts lie.
        parts: the parts of all workers; together they are every shard once.
        pieces: what this worker adds.
    """

    def __init__(self, arena: Arena, parts: Sequence[Node], pieces: Sequence[Piece]) -> None:
        self._arena = arena
        self._parts = [part.lo for part in parts]
        self.pieces = pieces
        self._additions = additions_over(parts, arena.plan.shards)
        self._views = {
            lo: [arena.gradients[lo].piece(p.index, p.start, p.stop) for p in pieces]
            for lo in self._parts
        }
        self._programs: dict[tuple[bytes, ...], _Program] = {}

    @property
    def totals(self) -> list[torch.Tensor]:
        """View the sums over this worker's pieces, as vectors."""
        return self._views[0]

    def add(self) -> tuple[bool, ...]:
        """Finish the tree over this worker's pieces.

        Returns:
            For each parameter of the arena, whether any shard had a gradient for it; only then
            is its total defined.
        """
        flags = tuple(self._arena.read_flags(lo) for lo in self._parts)
        program = self._programs.get(flags)
        if program is None:
            if len(self._programs) >= _PROGRAMS_AT_MOST:
                self._programs.clear()
            program = self._programs[flags] = self._compile(flags)
        for act, into, other in program.steps:
            act(into, other)
        return program.present

    def _compile(self, flags: tuple[bytes, ...]) -> _Program:
        """Work out what to do when the parts have gradients for just these parameters."""
        present = {lo: _presence(row) for lo, row in zip(self._parts, flags, strict=True)}
        steps: list[_Act] = []
        for into, other in self._additions:
            both: list[int] = []
            alone: list[int] = []
            for position, piece in enumerate(self.pieces):
                if present[other][piece.index]:
                    (both if present[into][piece.index] else alone).append(position)
            for act, positions in ((torch._foreach_add_, both), (torch._foreach_copy_, alone)):
                if positions:
                    views, values = self._views[into], self._views[other]
                    steps.append(
                        (act, [views[n] for n in positions], [values[n] for n in positions])
                    )
            present[into] = [a or b for a, b in zip(present[into], present[other], strict=True)]
        return _Program(tuple(steps), tuple(present[0]))


_Act = tuple[
    Callable[[list[torch.Tensor], list[torch.Tensor]], object],
    list[torch.Tensor],
    list[torch.Tensor],
]


@dataclass(frozen=True, slots=True)
class _Program:
    """The additions of one pattern of gradients: add where both sides have one, else take over."""

    steps: tuple[_Act, ...]
    present: tuple[bool, ...]


def _presence(row: bytes) -> list[bool]:
    complete = row[:1] == COMPLETE
    return [complete or flag != ABSENT for flag in row[1:]]

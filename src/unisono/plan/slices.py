"""Who updates what: every parameter cut into pieces, each worker a contiguous run of them.

Cuts lie at multiples of 1,024 elements from a parameter's start, so that every element keeps its
place in the kernels' vectors and a piece computes the bits that the whole would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CUT_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` … `stop` − 1 (in memory order) of the tensor at position `index`."""

    index: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether the tensor begins here; the worker of its first piece speaks for it."""
        return self.start == 0


def cut(numels: Sequence[int], num_workers: int) -> list[list[Piece]]:
    """Divide tensors among workers so that each gets about the same number of elements.

    Args:
        numels: the elements of each tensor.
        num_workers: W.

    Returns:
        One list of pieces a worker, in rank order; together they are every tensor once. A tensor
        without elements goes to one worker as an empty piece.
    """
    total = sum(numels)
    pieces: list[list[Piece]] = [[] for _ in range(num_workers)]
    before = 0
    for index, numel in enumerate(numels):
        start = 0
        while start < numel or (start == 0 and numel == 0):
            worker = min(num_workers - 1, (before + start) * num_workers // max(1, total))
            share_ends = -(-(worker + 1) * total // num_workers) - before
            stop = -(-share_ends // CUT_ELEMENTS) * CUT_ELEMENTS
            stop = numel if worker == num_workers - 1 else min(numel, max(stop, start + 1))
            pieces[worker].append(Piece(index, start, stop))
            if stop == numel:
                break
            start = stop
        before += numel
    return pieces

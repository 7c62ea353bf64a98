"""all_reduce: two ways to the same bits.

*Each for itself.* Each rank shows its vector and evaluates the whole tree: one meeting a chunk.
Best for two ranks (nothing is read or written in vain) and for short vectors.

*Slices.* Each rank shows its vector, reduces one slice of all vectors, shows that, and takes all
slices: two meetings a chunk, and each element crosses between cores twice, however many ranks.
"""

from __future__ import annotations

import torch

from unisono.c10d.board import Board, Meetings
from unisono.c10d.collectives import part_of, reduce
from unisono.c10d.reduction import combine

_FOR_ITSELF_UP_TO_BYTES = 1 << 16
_ALIGNED_ELEMENTS = 64


def all_reduce(board: Board, vector: torch.Tensor, reduction: str) -> Meetings:
    """Leave the reduction of all ranks' vectors in each of them.

    Args:
        board: the meeting place.
        vector: contiguous.
        reduction: which.
    """
    if board.num_ranks <= 2 or vector.numel() * vector.itemsize <= _FOR_ITSELF_UP_TO_BYTES:
        return reduce(board, vector, reduction)
    return _in_slices(board, vector, reduction)


def _in_slices(board: Board, vector: torch.Tensor, reduction: str) -> Meetings:
    dtype = vector.dtype
    for start, stop in board.chunks(vector.numel(), dtype):
        piece, mine = part_of(vector, start, stop), board.mine(dtype, stop - start)
        cuts = slices(stop - start, board.num_ranks)
        begin, end = cuts[board.rank]
        mine[:begin].copy_(piece[:begin])
        mine[end:].copy_(piece[end:])
        yield
        values = [shown[begin:end] for shown in board.shown(dtype, stop - start)]
        result = values[board.rank] = piece[begin:end]
        combine(reduction, values, result)
        board.mine(dtype, stop - start)[begin:end].copy_(result)
        yield
        for rank, shown in enumerate(board.shown(dtype, stop - start)):
            if rank != board.rank:
                begin, end = cuts[rank]
                piece[begin:end].copy_(shown[begin:end])


def slices(numel: int, num_ranks: int) -> list[tuple[int, int]]:
    """Cut a vector into one slice per rank, at multiples of 64 elements."""
    each = -(-numel // (num_ranks * _ALIGNED_ELEMENTS)) * _ALIGNED_ELEMENTS
    return [(min(r * each, numel), min((r + 1) * each, numel)) for r in range(num_ranks)]

"""all_reduce: three ways to the same bits.

*Each for itself.* Each rank shows its vector and evaluates the whole tree: one meeting a chunk.
Best for two ranks (nothing is read or written in vain) and for short vectors.

*Slices.* Each rank shows its vector, reduces one slice of all vectors, shows that, and takes all
slices: two meetings a chunk, and each element crosses between cores twice, however many ranks.

*In place.* If every rank's tensor lies in the shared memory, each rank reduces its slice where it
lies and writes the result into all tensors. Nothing else is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.c10d.board import Board, Meetings
from unisono.c10d.collectives import part_of, reduce
from unisono.c10d.group_memory import GroupMemory
from unisono.c10d.meeting import NO_NOTE as NOWHERE
from unisono.c10d.reduction import combine

_BLOCK_BYTES = 1 << 20
_FOR_ITSELF_UP_TO_BYTES = 1 << 16
_ALIGNED_ELEMENTS = 64
_KEPT_UP_TO_BYTES = 16 << 20  # views of longer vectors are many, and soon made beside the rest


def place_of(vector: torch.Tensor, region: GroupMemory) -> int:
    """Return where a vector lies in the shared memory, if it does and if that is of use."""
    if vector.numel() * vector.itemsize <= _FOR_ITSELF_UP_TO_BYTES:
        return NOWHERE  # showing a copy saves a meeting
    offset = region.offset_of(vector)
    return NOWHERE if offset is None else offset


def all_reduce(board: Board, vector: torch.Tensor, reduction: str, place: int) -> Meetings:
    """Leave the reduction of all ranks' vectors in each of them.

    Args:
        board: the meeting place.
        vector: contiguous.
        reduction: which.
        place: what was announced, from :func:`place_of`.
    """
    dtype = vector.dtype
    if place == NOWHERE:
        start, stop = next(board.chunks(vector.numel(), vector.dtype))
        board.mine(dtype, stop).copy_(part_of(vector, start, stop))
    yield
    places = board.meeting.notes()
    if NOWHERE not in places:
        yield from _in_place(board, vector.numel(), dtype, reduction, places)
        return
    is_shown = all(other == NOWHERE for other in places)
    if board.num_ranks <= 2 or vector.numel() * dtype.itemsize <= _FOR_ITSELF_UP_TO_BYTES:
        yield from reduce(board, vector, reduction, is_shown=is_shown)
    else:
        yield from _in_slices(board, vector, reduction, is_shown)


def _in_slices(board: Board, vector: torch.Tensor, reduction: str, is_shown: bool) -> Meetings:
    dtype = vector.dtype
    for start, stop in board.chunks(vector.numel(), vector.dtype):
        piece, mine = part_of(vector, start, stop), board.mine(dtype, stop - start)
        cuts = slices(stop - start, board.num_ranks)
        begin, end = cuts[board.rank]
        if not (is_shown and start == 0):
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


def _in_place(
    board: Board, numel: int, dtype: torch.dtype, reduction: str, places: Sequence[int]
) -> Meetings:
    what = (board.region, board.rank, numel, dtype, tuple(places))
    is_long = numel * dtype.itemsize > _KEPT_UP_TO_BYTES
    blocks = _blocks_in_place(*what) if is_long else board.once(_blocks_in_place, *what)
    for values, result, others in blocks:
        combine(reduction, values, result)
        for other in others:
            other.copy_(result)
    yield


def _blocks_in_place(
    region: GroupMemory, own: int, numel: int, dtype: torch.dtype, places: tuple[int, ...]
) -> list[tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]]:
    """View this rank's slice of everybody's tensors, block by block: values, result, others."""
    vectors = [region.memory.flat(place, numel, dtype) for place in places]
    begin, end = slices(numel, len(places))[own]
    block = _BLOCK_BYTES // dtype.itemsize
    blocks = []
    for start in range(begin, end, block):
        values = [vector[start : min(start + block, end)] for vector in vectors]
        others = [value for rank, value in enumerate(values) if rank != own]
        blocks.append((values, values[own], others))
    return blocks


def slices(numel: int, num_ranks: int) -> list[tuple[int, int]]:
    """Cut a vector into one slice per rank, at multiples of 64 elements."""
    each = -(-numel // (num_ranks * _ALIGNED_ELEMENTS)) * _ALIGNED_ELEMENTS
    return [(min(r * each, numel), min((r + 1) * each, numel)) for r in range(num_ranks)]

"""What each collective writes and reads, chunk by chunk; it yields wherever all ranks synchronize.

all_reduce has two methods with the same bits. *Each for itself*: each rank shows its vector and
evaluates the whole tree, with one barrier per chunk; best for two ranks (no read or write is
wasted) and for short vectors. *Slices*: each rank shows its vector, reduces one slice of all
vectors, shows the slice, and reads all slices. That takes two barriers per chunk, and each element
crosses between cores twice, for any number of ranks.

Each element is reduced separately, along the tree of :mod:`unisono.plan.summation`. ``AVG`` is the
sum divided by W. Averages of integers are rounded towards zero, as NCCL's are, and summed in 64
bits, so that narrow dtypes cannot overflow. Half precision is rounded after each addition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from unisono.errors import MismatchError
from unisono.plan.summation import tree_sum
from unisono.runtime.c10d.meeting import Board, Meetings

_Vector = torch.Tensor
_Vectors = Sequence[torch.Tensor]


def barrier() -> Meetings:
    """Synchronize all ranks."""
    yield


def broadcast(board: Board, vector: _Vector, root: int) -> Meetings:
    """Broadcast the root's vector to every rank."""
    dtype = vector.dtype
    for start, stop in board.chunks(vector.numel(), dtype):
        if board.rank == root:
            board.mine(dtype, stop - start).copy_(vector[start:stop])
        yield
        if board.rank != root:
            vector[start:stop].copy_(board.shown(dtype, stop - start)[root])


def reduce(board: Board, vector: _Vector, reduction: str, root: int | None = None) -> Meetings:
    """Reduce all vectors into the root's vector, or into every vector if `root` is None."""
    dtype = vector.dtype
    for start, stop in board.chunks(vector.numel(), dtype):
        piece = part_of(vector, start, stop)
        if board.rank != root:
            board.mine(dtype, stop - start).copy_(piece)
        yield
        if root is None or board.rank == root:
            values = board.shown(dtype, stop - start).copy()
            values[board.rank] = piece  # in cache, unlike its copy
            combine(reduction, values, piece)


def all_gather(board: Board, outputs: _Vectors, vector: _Vector) -> Meetings:
    """Copy each rank's vector to one output; lengths may differ."""
    dtype = vector.dtype
    for start, stop in board.chunks(max(output.numel() for output in outputs), dtype):
        own = vector[start:stop]
        board.mine(dtype, own.numel()).copy_(own)
        yield
        for rank, output in enumerate(outputs):
            piece = output[start:stop]
            if rank == board.rank:
                piece.copy_(own)
            else:
                piece.copy_(board.shown(dtype, piece.numel())[rank])


def gather(board: Board, outputs: _Vectors, vector: _Vector, root: int) -> Meetings:
    """Copy each rank's vector to the root's outputs; `outputs` is empty on other ranks."""
    dtype = vector.dtype
    for start, stop in board.chunks(vector.numel(), dtype):
        own = vector[start:stop]
        if board.rank != root:
            board.mine(dtype, stop - start).copy_(own)
        yield
        for rank, output in enumerate(outputs):
            shown = own if rank == root else board.shown(dtype, stop - start)[rank]
            output[start:stop].copy_(shown)


def scatter(board: Board, output: _Vector, inputs: _Vectors, root: int) -> Meetings:
    """Scatter the root's inputs, one to each rank; `inputs` is empty on other ranks."""
    dtype, num_ranks = output.dtype, board.num_ranks
    for start, stop in board.chunks(output.numel(), dtype, num_ranks):
        width = stop - start
        if inputs:
            _show_side_by_side(board, [vector[start:stop] for vector in inputs], width)
        yield
        if board.rank == root:
            output[start:stop].copy_(inputs[root][start:stop])
        else:
            shown = board.shown(dtype, num_ranks * width)[root]
            output[start:stop].copy_(shown[board.rank * width : (board.rank + 1) * width])


def reduce_scatter(board: Board, output: _Vector, inputs: _Vectors, reduction: str) -> Meetings:
    """Reduce all ranks' inputs for this rank; lengths may differ."""
    dtype, num_ranks, rank = output.dtype, board.num_ranks, board.rank
    for start, stop in board.chunks(max(vector.numel() for vector in inputs), dtype, num_ranks):
        width = stop - start
        _show_side_by_side(board, [vector[start:stop] for vector in inputs], width)
        yield
        piece = output[start:stop]
        begin = rank * width
        shown = board.shown(dtype, num_ranks * width)
        values = [vector[begin : begin + piece.numel()] for vector in shown]
        values[rank] = inputs[rank][start:stop]
        combine(reduction, values, piece)


def all_to_all(board: Board, outputs: _Vectors, inputs: _Vectors) -> Meetings:
    """Send each rank one input and receive one output from each; lengths may differ."""
    dtype, num_ranks, rank = inputs[0].dtype, board.num_ranks, board.rank
    longest = yield from _longest_of_all(board, outputs, inputs)
    for start, stop in board.chunks(longest, dtype, num_ranks):
        width = stop - start
        _show_side_by_side(board, [vector[start:stop] for vector in inputs], width)
        yield
        shown = board.shown(dtype, num_ranks * width)
        for other, output in enumerate(outputs):
            piece = output[start:stop]
            begin = rank * width
            given = shown[other][begin : begin + piece.numel()]
            piece.copy_(inputs[rank][start:stop] if other == rank else given)


def _longest_of_all(
    board: Board, outputs: _Vectors, inputs: _Vectors
) -> Generator[None, None, int]:
    """Exchange the sizes that each rank sends and receives; return the longest vector's length."""
    num_ranks = board.num_ranks
    mine = board.mine(torch.int64, 2 * num_ranks)
    mine.copy_(torch.tensor([vector.numel() for vector in (*inputs, *outputs)]))
    yield
    tables: list[list[int]] = [table.tolist() for table in board.shown(torch.int64, 2 * num_ranks)]
    for giver, table in enumerate(tables):
        for taker, given in enumerate(table[:num_ranks]):
            taken = tables[taker][num_ranks + giver]
            if given != taken:
                names = board.meeting.names
                raise MismatchError(
                    f"in all_to_all, rank {names[giver]} sends {given:,} elements to rank "
                    f"{names[taker]}, which expects {taken:,}: make the receiver's output sizes "
                    f"equal to the sender's input sizes."
                )
    return max(max(table) for table in tables)


def _show_side_by_side(board: Board, pieces: _Vectors, width: int) -> None:
    """Write one piece for each other rank, each at a multiple of `width`."""
    mine = board.mine(pieces[0].dtype, len(pieces) * width)
    for rank, piece in enumerate(pieces):
        if rank != board.rank:
            begin = rank * width
            mine[begin : begin + piece.numel()].copy_(piece)


def part_of(vector: _Vector, start: int, stop: int) -> _Vector:
    """Return a slice, or the vector if the slice is all of it: slicing takes a microsecond."""
    return vector if stop - start == vector.numel() else vector[start:stop]


_FOR_ITSELF_UP_TO_BYTES = 1 << 16
_ALIGNED_ELEMENTS = 64


def all_reduce(board: Board, vector: torch.Tensor, reduction: str) -> Meetings:
    """Reduce all ranks' vectors into each of them."""
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
    """Return one slice (begin, end) per rank, at multiples of 64 elements."""
    each = -(-numel // (num_ranks * _ALIGNED_ELEMENTS)) * _ALIGNED_ELEMENTS
    return [(min(r * each, numel), min((r + 1) * each, numel)) for r in range(num_ranks)]


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# By number: torch compares operations more slowly than everything else here.
_REDUCTION_OF = {getattr(ReduceOp, name).value: name for name in OPERATIONS}
# Intermediate sums are this long, to stay in the cores' cache and in malloc's heap.
_BLOCK_BYTES = 1 << 20


def reduction_of(opts: Any, dtype: torch.dtype) -> str:
    """Return the reduction that torch's options for a call request; SUM by default."""
    wanted = getattr(opts, "reduceOp", opts)
    wanted = ReduceOp.SUM if wanted is None else getattr(wanted, "op", wanted)
    name = _REDUCTION_OF.get(getattr(wanted, "value", None))
    if name is None:
        raise TypeError(f"the reduction must be one of {', '.join(OPERATIONS)}, but is {wanted}.")
    check(name, dtype)
    return name


def check(reduction: str, dtype: torch.dtype) -> None:
    """Raise if torch cannot apply a reduction to a dtype."""
    is_truth = reduction == "AVG" and dtype is torch.bool
    if is_truth or not _is_known_to_torch(reduction, dtype):
        raise TypeError(
            f"torch has no {reduction} of {dtype} on a CPU, so such tensors can be moved but not "
            f"reduced: convert them first."
        )


@functools.cache
def _is_known_to_torch(reduction: str, dtype: torch.dtype) -> bool:
    one = torch.zeros(1, dtype=dtype)
    try:
        OPERATIONS[reduction](one, one, out=torch.empty_like(one))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def combine(reduction: str, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the reduction of one vector per rank to `out`, which may be one of the vectors."""
    numel = out.numel()
    block = _BLOCK_BYTES // out.itemsize
    if len(values) <= 2 or numel <= block:
        _combine(reduction, values, out)
        return
    for start in range(0, numel, block):
        stop = min(start + block, numel)
        _combine(reduction, [value[start:stop] for value in values], out[start:stop])


def _combine(reduction: str, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    operation = OPERATIONS[reduction]
    num_ranks = len(values)
    if reduction == "AVG" and not (out.is_floating_point() or out.is_complex()):
        wide = [value.to(torch.int64) for value in values]
        out.copy_(tree_sum(wide, operation).div(num_ranks, rounding_mode="trunc"))
        return
    if num_ranks == 1:
        if out is not values[0]:
            out.copy_(values[0])
    elif num_ranks == 2:
        operation(values[0], values[1], out=out)
    else:
        # Sums that include the value stored in `out` are written to `out`: it is not read again.
        at = out.data_ptr()
        own = next((value for value in values if value.data_ptr() == at), values[0])

        def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            goes_out = one is own or other is own or one is out or other is out
            return operation(one, other, out=out if goes_out else None)

        tree_sum(values, add)
    if reduction == "AVG":
        out.div_(num_ranks)

"""How are the ranks' elements combined? Along the one binary tree of :mod:`~.plan.summation`.

The reduction over ranks 0 … W−1 is ``T[lo,hi) = T[lo,mid) ∘ T[mid,hi)``, element by element. No
element knows its neighbours, so the bits depend neither on where an element lies in a buffer, nor
on how buffers are cut for the journey, nor on who computes which slice. ``AVG`` is the sum,
divided by W. Averages of integers are rounded towards zero, as NCCL's are; their sums are taken in
64 bits, so that those of narrow dtypes cannot overflow. Elements of half precision are rounded
after each addition, as gloo does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from unisono.plan.summation import Node

_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BITWISE = ("BAND", "BOR", "BXOR")
# Sums on the way are this long: they stay in the cores' cache, and in malloc's heap.
_BLOCK_BYTES = 1 << 20


def check(reduction: str, dtype: torch.dtype) -> None:
    """Refuse what has no meaning for a dtype.

    Raises:
        TypeError: with the remedy.
    """
    is_number = dtype.is_floating_point or dtype.is_complex
    if reduction in _BITWISE and is_number:
        raise TypeError(f"{reduction} needs integers or bools, but got {dtype}: use MIN, MAX, SUM.")
    if reduction == "AVG" and dtype is torch.bool:
        raise TypeError(f"AVG needs numbers, but got {dtype}: use BAND or BOR, or convert them.")
    if reduction in ("MIN", "MAX") and dtype.is_complex:
        raise TypeError(f"{reduction} needs an order, but {dtype} has none: reduce its real view.")
    if not _is_known_to_torch(reduction, dtype):
        raise TypeError(
            f"torch has no {reduction} of {dtype} on a CPU, so such tensors can be moved but not "
            f"reduced: widen them first."
        )


@functools.cache
def _is_known_to_torch(reduction: str, dtype: torch.dtype) -> bool:
    one = torch.zeros(1, dtype=dtype)
    try:
        _OPERATIONS[reduction](one, one, out=torch.empty_like(one))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def combine(reduction: str, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the reduction of one vector per rank to `out`, which may be (the memory of) one."""
    numel = out.numel()
    block = _BLOCK_BYTES // out.itemsize
    if len(values) <= 2 or numel <= block:
        _combine(reduction, values, out)
        return
    for start in range(0, numel, block):
        stop = min(start + block, numel)
        _combine(reduction, [value[start:stop] for value in values], out[start:stop])


def _combine(reduction: str, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    operation = _OPERATIONS[reduction]
    num_ranks = len(values)
    if reduction == "AVG" and not (out.is_floating_point() or out.is_complex()):
        wide = [value.to(torch.int64) for value in values]
        total = _total(Node(0, num_ranks), wide, operation)
        out.copy_(total.div(num_ranks, rounding_mode="trunc"))
        return
    if num_ranks == 1:
        if out is not values[0]:
            out.copy_(values[0])
    elif num_ranks == 2:
        operation(values[0], values[1], out=out)
    else:
        left, right = Node(0, num_ranks).children()
        # One of the two goes where the result goes: the one that has it as a value, if any does.
        at = out.data_ptr()
        is_right = any(values[rank].data_ptr() == at for rank in range(right.lo, right.hi))
        total_left = _total(left, values, operation, None if is_right else out)
        total_right = _total(right, values, operation, out if is_right else None)
        operation(total_left, total_right, out=out)
    if reduction == "AVG":
        out.div_(num_ranks)


def _total(
    node: Node,
    values: Sequence[torch.Tensor],
    operation: Callable[..., torch.Tensor],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce a sub-tree: into `out`, which may be one of its values, or into a new tensor."""
    if node.is_leaf:
        return values[node.lo]
    left, right = node.children()
    return operation(_total(left, values, operation), _total(right, values, operation), out=out)

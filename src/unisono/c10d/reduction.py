"""Combines the ranks' elements along the binary tree of :mod:`unisono.plan.summation`.

Each element is reduced by itself, so its bits depend neither on where it lies in a buffer, nor on
how buffers are cut, nor on who computes which slice. ``AVG`` is the sum, divided by W. Averages of
integers are rounded towards zero, as NCCL's are, and summed in 64 bits, so that narrow dtypes
cannot overflow. Elements of half precision are rounded after each addition, as gloo does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from unisono.plan.summation import tree_sum

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
# By number: torch's own way to compare operations takes longer than all the rest here.
_REDUCTION_OF = {getattr(ReduceOp, name).value: name for name in OPERATIONS}
_BITWISE = ("BAND", "BOR", "BXOR")
# Sums on the way are this long: they stay in the cores' cache, and in malloc's heap.
_BLOCK_BYTES = 1 << 20


def reduction_of(opts: Any, dtype: torch.dtype) -> str:
    """Name the reduction of a call, from torch's options for it: SUM unless they say otherwise.

    Raises:
        TypeError: it is none of ours, or has no meaning for the dtype.
    """
    wanted = getattr(opts, "reduceOp", opts)
    wanted = ReduceOp.SUM if wanted is None else getattr(wanted, "op", wanted)
    name = _REDUCTION_OF.get(getattr(wanted, "value", None))
    if name is None:
        raise TypeError(f"the reduction must be one of {', '.join(OPERATIONS)}, but is {wanted}.")
    check(name, dtype)
    return name


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
        OPERATIONS[reduction](one, one, out=torch.empty_like(one))
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
        # Sums that include the value whose memory `out` is go to `out`: it is not read again.
        at = out.data_ptr()
        own = next((value for value in values if value.data_ptr() == at), values[0])

        def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            goes_out = one is own or other is own or one is out or other is out
            return operation(one, other, out=out if goes_out else None)

        tree_sum(values, add)
    if reduction == "AVG":
        out.div_(num_ranks)

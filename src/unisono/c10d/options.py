"""What torch's callers pass: options with a time limit and a reduction, lists of one tensor."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from unisono.c10d.calls import REDUCTIONS
from unisono.c10d.reduction import check

# By number: torch's own way to compare operations takes longer than all the rest here.
_REDUCTION_OF = {getattr(ReduceOp, name).value: name for name in REDUCTIONS}
_NO_TIME = timedelta(0)


def listed(tensors: Any) -> list[torch.Tensor]:
    """Take a tensor for a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(lists: Any) -> list[list[torch.Tensor]]:
    """Take a list for a list of one list."""
    return [lists] if isinstance(lists[0], torch.Tensor) else lists


def timeout_s(opts: Any) -> float | None:
    """Read the time limit of one call; torch says "none" with a negative one."""
    timeout = getattr(opts, "timeout", _NO_TIME)
    return timeout.total_seconds() if timeout > _NO_TIME else None


def reduction_of(opts: Any, dtype: torch.dtype) -> str:
    """Name the reduction of a call: SUM unless it says otherwise.

    Raises:
        TypeError: it is none of ours, or has no meaning for the dtype.
    """
    wanted = getattr(opts, "reduceOp", opts)
    wanted = ReduceOp.SUM if wanted is None else getattr(wanted, "op", wanted)
    name = _REDUCTION_OF.get(getattr(wanted, "value", None))
    if name is None:
        raise TypeError(f"the reduction must be one of {', '.join(REDUCTIONS)}, but is {wanted}.")
    check(name, dtype)
    return name

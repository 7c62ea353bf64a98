"""In which precision are forward passes computed? As written, or with torch's autocast.

Parameters, gradients, sums and updates stay as they are; within the loss function torch computes
what it knows to be safe in bfloat16. Bits are other ones then, so the precision belongs to a run's
identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

PRECISIONS = ("fp32", "bf16")


def in_precision(precision: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Have a loss or a forward function computed in a precision.

    Args:
        precision: ``"fp32"``: as it is written; ``"bf16"``: with autocast.
        compute: the function.

    Raises:
        ValueError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"`precision` must be one of {PRECISIONS}, but is {precision!r}.")
    if precision == "fp32":
        return compute

    @functools.wraps(compute)
    def autocast(*arguments: Any) -> Any:
        # One region a shard: what autocast keeps of the weights ends with it.
        with torch.autocast("cpu", torch.bfloat16):
            return compute(*arguments)

    return autocast

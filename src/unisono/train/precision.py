"""In which precision are forward passes computed? As written, or with torch's autocast.

Parameters, gradients, sums and updates stay as they are; within the loss function torch computes
what it knows to be safe in bfloat16 or float16. Small gradients vanish in float16, so the loss is
scaled up there. Bits are other ones then, so the precision belongs to a run's identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from unisono import device

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(precision: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Have a loss or a forward function computed in a precision.

    Args:
        precision: ``"fp32"``: as it is written; ``"bf16"``, ``"fp16"``: with autocast.
        compute: the function.
    """
    dtype = DTYPES[precision]
    if dtype is None:
        return compute

    @functools.wraps(compute)
    def autocast(*arguments: Any) -> Any:
        # One region a shard: what autocast keeps of the weights ends with it.
        with device.autocast(dtype):
            return compute(*arguments)

    return autocast


def scaler_for(
    precision: str, grad_scaler: torch.amp.GradScaler | None
) -> torch.amp.GradScaler | None:
    """Find out what scales the loss: in ``"fp16"`` torch's scaler or the user's, else nothing.

    Raises:
        ValueError: the user's does not fit the precision.
    """
    is_enabled = isinstance(grad_scaler, torch.amp.GradScaler) and grad_scaler.is_enabled()
    if precision != "fp16" and is_enabled:
        raise ValueError(
            f'`grad_scaler` must be left out unless `precision="fp16"`, but precision is '
            f"{precision!r}: its gradients do not vanish."
        )
    if precision == "fp16" and isinstance(grad_scaler, torch.amp.GradScaler) and not is_enabled:
        raise ValueError(
            '`grad_scaler` must be enabled with `precision="fp16"`, but is not: pass '
            '`torch.amp.GradScaler("cpu")`, say, or leave it out.'
        )
    if precision == "fp16" and grad_scaler is None:
        return device.grad_scaler()
    return grad_scaler

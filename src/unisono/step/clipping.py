"""Gradient clipping with the bits of torch's ``clip_grad_norm_`` and ``clip_grad_value_``.

The norm is that of the mean gradients of the whole global batch. Every worker computes it from all
sums, in torch's order, so it has the same bits everywhere; then each scales its own pieces, once
everybody has read::

    sum ── meet ── norm of everything ── meet ── scale my pieces, update
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

_TINY = 1e-6  # as torch's


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Compute torch's norm of tensors; on several devices with the bits of one, on the first.

    torch's own puts the norms of all tensors in the order of their devices, then of their dtypes,
    and rounding depends on that order.
    """
    devices = {tensor.device: None for tensor in tensors}
    if len(devices) < 2:
        return torch.nn.utils.get_total_norm(tensors)
    first, norms = tensors[0].device, dict[int, torch.Tensor]()
    for device in devices:
        places = [at for at, tensor in enumerate(tensors) if tensor.device == device]
        there = torch._foreach_norm([tensors[at] for at in places], 2.0)
        norms |= {at: norm.to(first) for at, norm in zip(places, there, strict=True)}
    together = [torch.empty(0, dtype=tensor.dtype, device=first) for tensor in tensors]
    groups = _group_tensors_by_device_and_dtype([together], with_indices=True)  # type: ignore[list-item]
    order = [at for _, indices in groups.values() for at in indices]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norms[at] for at in order]), 2.0)
    return total


@dataclass(frozen=True, slots=True)
class Clipping:
    """How gradients are clipped; not at all if both are None.

    Attributes:
        norm: the largest norm of all gradients together; infinite: the norm is computed, and
            nothing is scaled.
        value: the largest magnitude of each element.

    Raises:
        TypeError: one is not a number.
        ValueError: one is not above zero, or both are given.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("clip_norm", self.norm), ("clip_value", self.value)):
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, (int, float)):
                raise TypeError(
                    f"`{name}` must be a number, but is of type {type(limit).__name__}: pass "
                    f"`{name}=1.0`, say."
                )
            if not (limit > 0 and (math.isfinite(limit) or name == "clip_norm")):
                raise ValueError(
                    f"`{name}` must be above 0{' and finite' * (name == 'clip_value')}, but is "
                    f"{limit}: pass `{name}=1.0`, say, or leave it out."
                )
        if self.norm is not None and self.value is not None:
            raise ValueError(
                f"gradients can be clipped in one way, but both `clip_norm={self.norm}` and "
                f"`clip_value={self.value}` are given: leave one out."
            )

    def check_fits(self, optimizer: Optimizer) -> None:
        """Refuse to clamp what has no order.

        Raises:
            ValueError: a parameter is complex.
        """
        if self.value is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_complex():
                    raise ValueError(
                        f"`clip_value` takes real parameters alone, as torch's `clip_grad_value_` "
                        f"does, but the optimizer updates one of {parameter.dtype}: pass "
                        f"`clip_norm=1.0`, say."
                    )

    def clip_values(self, gradients: list[torch.Tensor]) -> None:
        """Clamp each element."""
        assert self.value is not None
        if gradients:
            torch._foreach_clamp_min_(gradients, -self.value)
            torch._foreach_clamp_max_(gradients, self.value)

    def scale(self, gradients: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Scale some of the gradients whose norm all together is `norm`, a scalar."""
        assert self.norm is not None
        if gradients and math.isfinite(self.norm):
            torch._foreach_mul_(gradients, torch.clamp(self.norm / (norm + _TINY), max=1.0))

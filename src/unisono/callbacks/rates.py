"""The learning rates of an optimizer, as they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


def rates_of(optimizer: Optimizer) -> list[float]:
    """List the learning rate of each group of parameters, of those that have one."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def named_rates(optimizer: Optimizer, separator: str) -> dict[str, float]:
    """Name the learning rates; where there are several, by `separator` and the group's position."""
    rates = rates_of(optimizer)
    if len(rates) == 1:
        return {"learning_rate": rates[0]}
    return {f"learning_rate{separator}{at}": rate for at, rate in enumerate(rates)}

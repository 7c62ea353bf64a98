"""The learning rates of an optimizer, as they are now."""

from __future__ import annotations

from torch.optim import Optimizer


def rates_of(optimizer: Optimizer) -> list[float]:
    """List the learning rate of each group of parameters, of those that have one."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]

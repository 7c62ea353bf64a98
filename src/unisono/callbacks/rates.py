"""The learning rates of an optimizer, as they are now."""

from __future__ import annotations

from torch.optim import Optimizer


def rates_of(optimizer: Optimizer) -> list[float]:
    """List the learning rate of each group of parameters; 0 where a group has none."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]

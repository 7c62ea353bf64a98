"""What a tool may see of a process's steps: `unisono verify` sets ``ShardPasses.watch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


class StepWatch:
    """Receives what happens in each step, and changes nothing; this base class ignores it."""

    def begin(self, model: nn.Module, names: Sequence[str]) -> None:
        """Called before a step's passes, with the names of the updated parameters."""

    def read(self, shard: int, batch: Any) -> None:
        """Called with the batch of one of this worker's shards, before its forward pass."""

    def differentiated(self, shard: int, parameters: Sequence[nn.Parameter]) -> None:
        """Called after a shard's backward pass, whose gradients are in ``.grad``."""

    def done(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Called after an update that all workers have."""

    def told(self, line: str) -> None:
        """Called with each line about the program that a worker finds out."""

"""How parts of gradients come to those who add them up, inside of a host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from unisono.engine.exchange.parts import Gradients
from unisono.plan.shards import Piece
from unisono.plan.summation import Node


class Carriage(ABC):
    """Carries the gradients of one worker to the sums, and sums to all workers.

    Attributes:
        pieces: the pieces of parameters that `totals` are the sums of.
        totals: the sums over `pieces`, as vectors, once they are added up.
        whole: the sums of all parameters, in the parameters' shapes, once all sums are here.
    """

    pieces: Sequence[Piece]
    totals: Sequence[torch.Tensor]
    whole: list[torch.Tensor]

    @property
    @abstractmethod
    def takes_early(self) -> bool:
        """Whether :meth:`publish_early` helps now."""

    @abstractmethod
    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Publish one parameter of this worker's last part while a backward pass goes on."""

    @abstractmethod
    def publish(self, part: Node, gradients: Gradients) -> None:
        """Publish a part of this worker. Raise TypeError if a gradient is sparse."""

    @abstractmethod
    def forget_step(self) -> None:
        """Forget what was published in a step, as the run returns to a snapshot."""

    @abstractmethod
    def gather(self, purpose: str) -> bool:
        """Wait until every worker has published its parts; return False if one was lost."""

    @abstractmethod
    def plan(self, *, everywhere: bool) -> None:
        """Prepare for the present division.

        Args:
            everywhere: every worker needs the sums of all parameters, not those of its pieces.
        """

    @abstractmethod
    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """Fill :attr:`totals`; return for each parameter whether any shard has a gradient."""

    @abstractmethod
    def await_readers(self, purpose: str) -> None:
        """Wait until no worker reads parts or sums of this step any more."""

    @abstractmethod
    def close(self) -> None:
        """Release what this worker alone has. Not collective."""

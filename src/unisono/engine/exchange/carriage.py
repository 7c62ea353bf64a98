"""How parts of gradients come to those who add them up, inside of a host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from unisono.engine.exchange.arena import Region
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.parts import Gradients, PublishedParts
from unisono.plan.shards import Piece
from unisono.plan.summation import Node
from unisono.runtime.workers.memory import Memory


class Carriage(ABC):
    """Carries the gradients of one worker to the sums, and sums to all workers.

    A method with a body here does what is right for a carriage that brings all sums everywhere by
    itself, so that nothing is left to add up on a host or between hosts.

    Attributes:
        pieces: the pieces of parameters that `totals` are the sums of.
        totals: the sums over `pieces`, as vectors, once they are added up.
        whole: the sums of all parameters, in the parameters' shapes, once all sums are here.
    """

    pieces: Sequence[Piece]
    totals: Sequence[torch.Tensor]
    whole: list[torch.Tensor]

    def __init__(self, layout: LoopLayout) -> None:
        self.layout, self.team, self.arena = layout, layout.team, layout.memory.arena

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

    def published(self) -> PublishedParts:
        """Return all parts, of which this worker's lane is read; here only their flags are."""
        nodes, nothing = self.layout.division.parts, Region(Memory.private(0), 0, ())
        rows = [(self.arena.flags[node.lo],) for node in nodes]
        return PublishedParts(nodes, rows, [nothing] * len(nodes))

    def fetch(self) -> None:
        """Bring this worker's lane of others' parts here, once all are published."""
        return

    def host_sums(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return where sums of these pieces are used that were made in the host's memory."""
        return []

    def fetch_sums(self) -> None:
        """Bring the sums of this worker's lane from the host's memory to where they are used."""
        return

    def give_sums(self) -> None:
        """Copy the sums of this worker's lane to the host's memory."""
        return

    def take_sums(self, *, with_own: bool) -> None:
        """Copy all sums from the host's memory to this worker."""
        return

"""How parts of gradients reach the workers that add them up, within a host."""

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
    """Carries the gradients of one worker to the sums, and the sums to all workers.

    Methods with a body are the defaults for a carriage that itself computes all sums everywhere.

    Attributes:
        pieces: the pieces of parameters whose sums are in `totals`.
        totals: the sums of `pieces`, as vectors, once they are added up.
        whole: the sums of all parameters, in their shapes, once this worker has all sums.
    """

    pieces: Sequence[Piece]
    totals: Sequence[torch.Tensor]
    whole: list[torch.Tensor]

    def __init__(self, layout: LoopLayout) -> None:
        self.layout, self.team, self.arena = layout, layout.team, layout.memory.arena

    @property
    @abstractmethod
    def takes_early(self) -> bool:
        """Whether :meth:`publish_early` speeds up the step now."""

    @abstractmethod
    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Publish one parameter of this worker's last part during its backward pass."""

    @abstractmethod
    def publish(self, part: Node, gradients: Gradients) -> None:
        """Publish a part of this worker. Raise TypeError if a gradient is sparse."""

    @abstractmethod
    def forget_step(self) -> None:
        """Discard what was published in a step, because the run returns to a snapshot."""

    @abstractmethod
    def gather(self, purpose: str) -> bool:
        """Wait until every worker has published its parts; return False if one was lost."""

    @abstractmethod
    def plan(self, *, everywhere: bool) -> None:
        """Prepare for the current division of the work.

        Args:
            everywhere: every worker needs the sums of all parameters, not only of its pieces.
        """

    @abstractmethod
    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """Fill :attr:`totals`; return for each parameter whether any shard has a gradient."""

    @abstractmethod
    def await_readers(self, purpose: str) -> None:
        """Wait until no worker reads parts or sums of this step any more."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory and connections of this worker. Not collective."""

    def published(self) -> PublishedParts:
        """Return all parts, of which this worker reads its lane; by default only their flags."""
        nodes, nothing = self.layout.division.parts, Region(Memory.private(0), 0, ())
        rows = [(self.arena.flags[node.lo],) for node in nodes]
        return PublishedParts(nodes, rows, [nothing] * len(nodes))

    def fetch(self) -> None:
        """Copy this worker's lane of the other workers' parts here, once all are published."""
        return

    def host_sums(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return where sums of these pieces are needed that are computed in the host's memory."""
        return []

    def fetch_sums(self) -> None:
        """Copy the sums of this worker's lane from the host's memory to where they are needed."""
        return

    def copy_sums_to_host(self) -> None:
        """Copy the sums of this worker's lane to the host's memory."""
        return

    def copy_sums_from_host(self, *, with_own: bool) -> None:
        """Copy all sums from the host's memory to this worker."""
        return

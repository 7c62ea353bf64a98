"""Between hosts: what the workers of other hosts add to the sums of this one.

Parameters are cut into lanes, one for each worker that adds up. On one host every worker has a
lane, and nothing crosses (:class:`OneHost`). On several hosts, worker i of each host shares lane i
with worker i of the others (``lanes.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from typing_extensions import override

from unisono.engine.exchange.arena import Region
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.parts import OrderedSum
from unisono.plan.shards import Piece


def _nothing() -> None:
    pass


class Between(ABC):
    """Completes the sums of one host with those of the others.

    Methods with a body are the defaults for a single host.

    Attributes:
        sums: where sums lie in the host's memory, if the workers' parts do.
        takes_early: whether gradients may leave the host during the backward pass.
    """

    sums: Region
    takes_early = False

    @property
    @abstractmethod
    def num_lanes(self) -> int:
        """The number of lanes that the parameters are cut into."""

    @property
    @abstractmethod
    def number(self) -> int | None:
        """The lane of this worker; None: its host has more workers than there are lanes."""

    def share(self, views: Callable[[], Sequence[memoryview]]) -> None:
        """Copy memory of the first host to the others as a loop begins. Collective."""
        return

    def begin(self) -> None:
        """Start sending gradients of this step as they are marked."""
        return

    def mark(self, index: int) -> None:
        """Record that this worker's gradient of a parameter is in the host's memory."""
        return

    def mark_changed(self, indices: Sequence[int]) -> None:
        """Record that gradients changed after they were marked."""
        return

    def mark_copied(self, indices: Sequence[int], are_made: Callable[[], bool]) -> None:
        """Record that gradients are being copied there; `are_made` returns whether they arrived."""
        return

    def mark_copied_again(self) -> None:
        """Record that gradients changed after :meth:`mark_copied`, and are copied once more."""
        return

    @abstractmethod
    def gather(self, purpose: str, meanwhile: Callable[[], None] = _nothing) -> bool:
        """Wait until every worker has published its parts. Collective.

        `meanwhile` may be called once this worker has arrived. Return False if one was lost.
        """

    @abstractmethod
    def plan(
        self,
        lanes: Sequence[Sequence[Piece]],
        carriage: Carriage,
        into: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        """Prepare to add up this worker's lane; return where its sums will be, as vectors.

        Args:
            lanes: the pieces of each lane; all are empty if the carriage exchanges the sums.
            into: where to store the sums; None: over the parts, which are not needed any more.
        """

    @abstractmethod
    def add_up(self, carriage: Carriage) -> tuple[bool, ...]:
        """Add up this worker's lane; return for each parameter whether it has a gradient."""

    @abstractmethod
    def spread(self, carriage: Carriage, purpose: str) -> bool:
        """Copy the sums of all lanes to this worker. Return False if a worker was lost."""

    def leave(self) -> None:
        """Close the connections to other hosts. Not collective."""
        return


@final
class OneHost(Between):
    """A single host: each worker adds up its lane of the parts of all workers."""

    _sum: OrderedSum

    def __init__(self, layout: LoopLayout) -> None:
        self._team, self.sums = layout.team, layout.memory.arena.gradients[0]

    @property
    @override
    def num_lanes(self) -> int:
        return self._team.size

    @property
    @override
    def number(self) -> int:
        return self._team.position

    @override
    def gather(self, purpose: str, meanwhile: Callable[[], None] = _nothing) -> bool:
        self._team.arrive(purpose)
        meanwhile()
        return self._team.wait()

    @override
    def plan(
        self,
        lanes: Sequence[Sequence[Piece]],
        carriage: Carriage,
        into: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        self._sum = OrderedSum(carriage.published(), lanes[self.number], into)
        return self._sum.totals

    @override
    def add_up(self, carriage: Carriage) -> tuple[bool, ...]:
        carriage.fetch()
        return self._sum.add()

    @override
    def spread(self, carriage: Carriage, purpose: str) -> bool:
        carriage.copy_sums_to_host()
        if not self._team.meet(purpose):
            return False
        carriage.copy_sums_from_host(with_own=False)
        return True

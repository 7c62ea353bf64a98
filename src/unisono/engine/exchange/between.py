"""Between hosts: what the workers of other hosts add to the sums of this one.

Parameters are cut into lanes, one for each worker that adds up. On one host every worker has a
lane, and nothing crosses (:class:`OneHost`). On several hosts, worker i of each host shares lane i
with worker i of the others (``lanes.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
from typing_extensions import override

from unisono.engine.exchange.arena import Region
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.parts import OrderedSum, OwnParts, PublishedParts
from unisono.plan.shards import Piece
from unisono.runtime.workers.memory import Memory


class PartsOfHost(Protocol):
    """What a carriage does for the one who adds up the parts of its host."""

    def published(self) -> PublishedParts:
        """Return the parts of all workers; only this worker's lane of them is read."""

    def fetch(self) -> None:
        """Bring that lane here once all parts are published."""

    def host_sums(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return where sums that were made in the host's memory are used."""

    def fetch_sums(self) -> None:
        """Bring the sums of this worker's lane there."""

    def give_sums(self) -> None:
        """Copy the sums of this worker's lane to the host's memory."""

    def take_sums(self, *, with_own: bool) -> None:
        """Copy all sums from the host's memory to this worker."""


@final
class FlagsOfOthers:
    """Of other workers, what flags say of their parts; sums come to this worker another way.

    Args:
        own: this worker's parts.
    """

    def __init__(self, layout: LoopLayout, own: OwnParts) -> None:
        self._layout, self._own = layout, own

    def published(self) -> PublishedParts:
        """Return all parts; those of others are empty, so only a worker alone can add them up."""
        division, flags = self._layout.division, self._layout.memory.arena.flags
        mine, nothing = division.parts_of[self._layout.team.world.rank], Memory.private(0)
        empty = Region(nothing, 0, ())
        regions = [self._own[node.lo] if node in mine else empty for node in division.parts]
        rows = [(flags[node.lo],) for node in division.parts]
        return PublishedParts(division.parts, rows, regions)

    def host_sums(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        """Return nothing: no sums are made in the host's memory."""
        return []

    def fetch(self) -> None:
        """Do nothing, and so do the others."""

    fetch_sums = give_sums = fetch

    def take_sums(self, *, with_own: bool) -> None:
        """Do nothing."""


def _nothing() -> None:
    pass


class Between(ABC):
    """Completes the sums of one host with those of the others.

    Attributes:
        takes_early: whether gradients may leave the host while the backward pass goes on.
        sums: where sums lie in the host's memory, if the workers' parts do.
    """

    takes_early: bool
    sums: Region

    @property
    @abstractmethod
    def num_lanes(self) -> int:
        """The number of lanes that the parameters are cut into."""

    @property
    @abstractmethod
    def number(self) -> int | None:
        """The lane of this worker; None: its host has more workers than there are lanes."""

    @property
    @abstractmethod
    def is_broken(self) -> bool:
        """Whether a loss since :meth:`trust` makes all hosts return to the newest snapshot."""

    @abstractmethod
    def trust(self) -> None:
        """Treat the present state as the run's."""

    @abstractmethod
    def share(self, views: Callable[[], Sequence[memoryview]]) -> None:
        """Copy memory of the first host to the others as a loop begins. Collective."""

    @abstractmethod
    def go_back(self, put_back: Callable[[], None], *, in_shares: bool) -> None:
        """Put the newest snapshot back. Collective.

        Args:
            put_back: copies what this worker has to copy; may be called several times.
            in_shares: each worker of a host copies a share, so all have to wait for all.
        """

    @abstractmethod
    def begin(self) -> None:
        """Start sending gradients of this step as they are marked."""

    @abstractmethod
    def mark(self, index: int) -> None:
        """Record that this worker's gradient of a parameter is in the host's memory."""

    @abstractmethod
    def mark_changed(self, indices: Sequence[int]) -> None:
        """Record that gradients changed after they were marked."""

    @abstractmethod
    def mark_copied(self, indices: Sequence[int], are_made: Callable[[], bool]) -> None:
        """Record that gradients are being copied there; `are_made` returns whether they arrived."""

    @abstractmethod
    def mark_copied_again(self) -> None:
        """Record that gradients changed after :meth:`mark_copied`, and are copied once more."""

    @abstractmethod
    def gather(self, purpose: str, meanwhile: Callable[[], None] = _nothing) -> bool:
        """Wait until every worker has published its parts. Collective.

        `meanwhile` may be called once this worker has arrived. Return False if one was lost.
        """

    @abstractmethod
    def plan(
        self,
        lanes: Sequence[Sequence[Piece]],
        parts: PartsOfHost,
        into: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        """Prepare to add up this worker's lane; return where its sums will be, as vectors.

        Args:
            lanes: the pieces of each; none in any if gradients go another way.
            into: where to put the sums; None: where parts are, which are not needed then.
        """

    @abstractmethod
    def add_up(self, parts: PartsOfHost) -> tuple[bool, ...]:
        """Add up this worker's lane; return for each parameter whether it has a gradient."""

    @abstractmethod
    def spread(self, parts: PartsOfHost, purpose: str) -> bool:
        """Bring the sums of all lanes to this worker. Return False if a worker was lost."""

    @abstractmethod
    def leave(self) -> None:
        """Close the connections to other hosts. Not collective."""


@final
class OneHost(Between):
    """There are no other hosts: each worker adds up the parts of all where it can see them."""

    takes_early = False
    is_broken = False
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
    def trust(self) -> None:
        pass

    @override
    def share(self, views: Callable[[], Sequence[memoryview]]) -> None:
        pass

    @override
    def go_back(self, put_back: Callable[[], None], *, in_shares: bool) -> None:
        put_back()
        while in_shares and not self._team.meet("putting back"):
            put_back()

    @override
    def begin(self) -> None:
        pass

    @override
    def mark(self, index: int) -> None:
        pass

    @override
    def mark_changed(self, indices: Sequence[int]) -> None:
        pass

    @override
    def mark_copied(self, indices: Sequence[int], are_made: Callable[[], bool]) -> None:
        pass

    @override
    def mark_copied_again(self) -> None:
        pass

    @override
    def gather(self, purpose: str, meanwhile: Callable[[], None] = _nothing) -> bool:
        self._team.come(purpose)
        meanwhile()
        return self._team.wait()

    @override
    def plan(
        self,
        lanes: Sequence[Sequence[Piece]],
        parts: PartsOfHost,
        into: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        self._sum = OrderedSum(parts.published(), lanes[self.number], into)
        return self._sum.totals

    @override
    def add_up(self, parts: PartsOfHost) -> tuple[bool, ...]:
        parts.fetch()
        return self._sum.add()

    @override
    def spread(self, parts: PartsOfHost, purpose: str) -> bool:
        parts.give_sums()
        if not self._team.meet(purpose):
            return False
        parts.take_sums(with_own=False)
        return True

    @override
    def leave(self) -> None:
        pass

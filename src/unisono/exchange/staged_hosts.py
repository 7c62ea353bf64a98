"""An exchange for workers of several hosts, each worker with a replica. Never run on a GPU.

::

    a worker's device  parts ──►┌────────┐ lanes, added up ┌────────┐──► all sums
                                │ host's │──► with other ──►│ host's │
    another's          parts ──►│ memory │      hosts       │ memory │──► all sums
                                └────────┘                  └────────┘
                         gather: all meet            add up: all meet

Inside a host parts and sums are copied as in ``staged.py``. A bucket leaves the host once its
copies into the host's memory are made, which the thread of the lane asks for: what a device has
been told to do takes longer than the telling.

No memory is written while somebody reads it. A bucket's sums reach the host's memory only after all
of its workers have left their gradients of that bucket in the next step; by then each has copied
the sums of this one, as a device makes its copies in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from unisono.exchange.early_part import EarlyPart
from unisono.exchange.homes import StateKeys
from unisono.exchange.host_crossing import HostCrossing
from unisono.exchange.parts import Gradients
from unisono.exchange.ready_buckets import ReadyBuckets
from unisono.exchange.staged import StagedExchange
from unisono.plan.summation import Node
from unisono.workers.launcher_messages import Live


class StagedHostsExchange(StagedExchange):
    """An exchange between hosts. Final; arguments as of :class:`~.protocol.Exchange`."""

    @property
    def takes_early(self) -> bool:  # type: ignore[override]
        """See :class:`~.protocol.Exchange`; on CPUs, too."""
        return True

    @property
    def is_lost(self) -> bool:
        """See :class:`~.protocol.Exchange`; whoever was lost, all go back."""
        return self._crossing.is_broken

    def trust_leader(self) -> None:
        """See :class:`~.protocol.Exchange`."""
        super().trust_leader()
        self._crossing.trust()

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """See :class:`~.protocol.Exchange`."""
        self._crossing.begin()
        if self.device.is_host:
            self._early.put(part, index, gradient)
            self._crossing.ready.mark(index)
        else:
            super().publish_early(part, index, gradient)

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`~.protocol.Exchange`."""
        has_begun, ready = self._early.has_begun, self._crossing.ready
        if has_begun and self.device.is_host:
            ready.mark_changed(self._early.complete(part, gradients))
            return
        super().publish(part, gradients)
        if has_begun:
            ready.is_outdated |= self._buckets.is_outdated

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`~.protocol.Exchange`; afterwards this host knows what all shards say."""
        self._crossing.begin()
        self.copies.wait()
        self._leaving.clear()
        self._crossing.gather(purpose)
        return None

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`~.protocol.Exchange`; everybody has all sums then."""
        present = self._crossing.finish()
        self._team.meet(purpose)
        for there, here in self._sums_within(0, self._num_bytes):
            self.copies.to_device(here, there)
        return present

    def unbind(self) -> None:
        """See :class:`~.protocol.Exchange`."""
        self._crossing.leave()
        super().unbind()

    @property
    def _copies_parts(self) -> bool:
        return not self.device.is_host

    def _copy_bucket(self, part: Node, span: tuple[int, int]) -> None:
        super()._copy_bucket(part, span)
        self._leaving.add(self._buckets.indices(span), self.copies.issued())
        self._leaving.look(self._crossing.ready)  # where no lane's thread does

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        self._early, self._leaving = EarlyPart(self._parts), _LeavingGradients()
        self._crossing = HostCrossing(self._team, self.memory, self.buffers, self._leaving.look)
        super()._bind(keys, live)

    def _bring_to_hosts(self, slot: int) -> None:
        """Connect the lanes, and bring the first host's snapshot to the others."""
        snapshots = self.memory.snapshots
        said = self._team.hear_leader(lambda: b"%d" % snapshots.written(slot), "size of the state")
        self._crossing.share([snapshots.view(slot, int(said))])

    def _load(self) -> None:
        take_newest = super()._load

        def load() -> None:
            self._leaving.clear()
            self._early = EarlyPart(self._parts)
            take_newest()

        self._crossing.go_back(load, wait=self.copies.wait)

    def _plan_sum(self) -> None:
        lanes = self._cut(self._crossing.num_lanes)
        arena = self.memory.arena
        self._crossing.plan(self.division, lanes, (arena.memory, arena.sums.start))
        self.totals = self._all_sums()
        self._view_whole()


class _LeavingGradients:
    """Gradients of a step on their way from a device to the memory of its host. Final."""

    def __init__(self) -> None:
        self._copied: deque[tuple[Sequence[int], Callable[[], bool]]] = deque()
        self._looking = threading.Lock()

    def add(self, indices: Sequence[int], are_made: Callable[[], bool]) -> None:
        """Note parameters whose gradients are copied, and what tells whether they are there."""
        self._copied.append((indices, are_made))

    def look(self, ready: ReadyBuckets) -> None:
        """Count those that are there; any thread may."""
        with self._looking:
            while self._copied and self._copied[0][1]():
                for index in self._copied.popleft()[0]:
                    ready.mark(index)

    def clear(self) -> None:
        """Forget all; nobody is counting any when this returns."""
        with self._looking:
            self._copied.clear()

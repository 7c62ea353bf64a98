"""Exchanges for workers of several hosts: one copy of the parameters on each, or replicas.

With one copy on each host, all inside of a host is as in ``shared.py``. Worker i of every host
adds up its slice together with worker i of the others (``host_all_reduce.py``), and updates it: so
do all hosts, with the same bits.

With replicas whose parts travel through the memory of their host (never run on a GPU), parts and
sums are copied inside of a host as in ``staged.py``::

    a worker's device  parts ──►┌────────┐ lanes, added up ┌────────┐──► all sums
                                │ host's │──► with other ──►│ host's │
    another's          parts ──►│ memory │      hosts       │ memory │──► all sums
                                └────────┘                  └────────┘
                         gather: all meet            add up: all meet

A bucket leaves the host once its copies into the host's memory are made, which the thread of the
lane asks for. No memory is written while it is read: a bucket's sums reach the host's memory only
after all of its workers have left their gradients of that bucket in the next step; by then each has
copied the sums of this one, as a device makes its copies in order.

With replicas whose parts travel through one process group of all workers, what others tell of their
parts crosses with the meeting of all. Which parameters those have gradients for is known only then:
slices are added up as if that were as in the step before; where it is not, all is sent again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from unisono.engine.exchange.arena import Region, size_of
from unisono.engine.exchange.bucket_pipeline import BucketPipeline
from unisono.engine.exchange.early_part import EarlyPart, ReadyBuckets
from unisono.engine.exchange.group_exchange import GroupExchange
from unisono.engine.exchange.host_all_reduce import HostAllReduce
from unisono.engine.exchange.parts import Gradients
from unisono.engine.exchange.protocol import Exchange
from unisono.engine.exchange.replicas import ReplicaExchange
from unisono.engine.exchange.shared import SharedExchange
from unisono.engine.exchange.shared_optimizer_state import StateKeys
from unisono.engine.exchange.staged import StagedExchange
from unisono.plan.shards import Piece
from unisono.plan.summation import Node
from unisono.runtime.workers.launcher_messages import Live
from unisono.runtime.workers.memory import Memory


class _BetweenHosts(Exchange):
    """What exchanges between hosts have in common. Abstract."""

    takes_early = True  # on CPUs, too
    _all_reduce: HostAllReduce
    _early: EarlyPart

    @property
    def is_lost(self) -> bool:
        """See :class:`Exchange`; after any loss all go back."""
        return self._all_reduce.is_broken

    def trust_leader(self) -> None:
        """See :class:`Exchange`."""
        super().trust_leader()
        self._all_reduce.trust()

    def unbind(self) -> None:
        """See :class:`Exchange`."""
        self._all_reduce.leave()
        super().unbind()


class _Lanes(_BetweenHosts):
    """Of these, what cuts parameters into lanes, and has parts in memory of the host. Abstract."""

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        self._all_reduce.begin()
        self._early.put(part, index, gradient)
        self._all_reduce.ready.mark(index)

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`Exchange`."""
        if self._early.has_begun:
            self._all_reduce.ready.mark_changed(self._early.complete(part, gradients))
        else:
            super().publish(part, gradients)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`Exchange`; afterwards this host knows what all shards have to say."""
        self._all_reduce.gather(purpose)
        return None


class HostsExchange(_Lanes, SharedExchange):
    """An exchange between hosts. Final."""

    @property
    def acts(self) -> bool:
        """See :class:`Exchange`; where one worker updates for all, one of each host does."""
        return self.have_all or self._team.leads_host

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`."""
        return self._all_reduce.finish()

    def all_sums(self, purpose: str) -> bool:
        """See :class:`Exchange`."""
        everywhere = self.memory.arena.gradients[0].pieces(self.pieces)
        for place, total in zip(everywhere, self.totals, strict=True):
            place.copy_(total)
        return super().all_sums(purpose)

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        self._early = EarlyPart(self._parts)
        self._all_reduce = HostAllReduce(self._team, self.memory, self.buffers)
        super()._bind(keys, live)

    def _bring_to_hosts(self) -> None:
        """Connect the lanes, and bring the first host's state to the others."""
        arena = self.memory.arena
        spans = arena.state_spans(0)
        self._all_reduce.share([arena.memory.view(start, stop - start) for start, stop in spans])

    def _put_back(self) -> None:
        def put_back() -> None:
            self._early = EarlyPart(self._parts)
            here, memory = self._team.neighbours, self.memory
            position = here.index(self._team.world.rank)
            slot, copy_of_buffers = memory.newest_slot, memory.copy_of_buffers
            self._copy(slot, copy_of_buffers, position, len(here), into_slot=False)

        self._all_reduce.go_back(put_back)

    def _plan_sum(self) -> None:
        all_reduce, number = self._all_reduce, self._all_reduce.number
        lanes = self._cut(all_reduce.num_lanes)
        self.pieces = [] if number is None else lanes[number]
        slots = self.memory.arena.plan.parameters
        totals = Memory.private(0 if number is None else size_of(slots))
        all_reduce.plan(self.division, lanes, (totals, 0))
        self.totals = Region(totals, 0, slots).pieces(self.pieces)


class _ReplicasBetweenHosts(_BetweenHosts, ReplicaExchange):
    def _bring_to_hosts(self, slot: int) -> None:
        """Connect the lanes, and bring the first host's snapshot to the others."""
        snapshots = self.memory.snapshots
        said = self._team.hear_leader(lambda: b"%d" % snapshots.written(slot), "size of the state")
        self._all_reduce.share([snapshots.view(slot, int(said))])

    def _load(self) -> None:
        take_newest = super()._load

        def load() -> None:
            self._early = EarlyPart(self._parts)
            take_newest()

        self._all_reduce.go_back(load, wait=self.copies.wait)


class GroupHostsExchange(_ReplicasBetweenHosts, GroupExchange):
    """An exchange between hosts. Final."""

    takes_early = GroupExchange.takes_early

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`Exchange`; all sums are here then."""
        pipeline, communicator = self._pipeline, self._connected()
        if pipeline is None:
            return super().gather(purpose)
        self.copies.wait()
        if communicator is not None:
            pipeline.send_all(communicator)
        self._all_reduce.gather(purpose)
        return None if self._settle(pipeline) else self._take_over()

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`; brings the buffers of other hosts here."""
        return self._all_reduce.finish()

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        self._all_reduce = HostAllReduce(self._team, self.memory, self.buffers)
        super()._bind(keys, live)

    def _load(self) -> None:
        self._close()
        super()._load()

    def _is_outdated(self, pipeline: BucketPipeline) -> bool:
        return super()._is_outdated(pipeline) or any(one.is_outdated() for one in self._sums)

    def _plan_sum(self) -> None:
        super()._plan_sum()
        lanes: list[list[Piece]] = [[] for _ in range(self._all_reduce.num_lanes)]
        self._all_reduce.plan(self.division, lanes, (Memory.private(0), 0))


class StagedHostsExchange(_Lanes, _ReplicasBetweenHosts, StagedExchange):
    """An exchange between hosts. Final."""

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        if self.device.is_host:
            super().publish_early(part, index, gradient)
        else:
            self._all_reduce.begin()
            StagedExchange.publish_early(self, part, index, gradient)

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`Exchange`."""
        if self.device.is_host:
            super().publish(part, gradients)
            return
        has_begun = self._early.has_begun
        StagedExchange.publish(self, part, gradients)
        if has_begun:
            self._all_reduce.ready.is_outdated |= bool(self._buckets.changed)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`Exchange`."""
        self._all_reduce.begin()
        self.copies.wait()
        self._leaving.clear()
        return super().gather(purpose)

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`; everybody has all sums then."""
        present = self._all_reduce.finish()
        self._team.meet(purpose)
        for there, here in self._sums_within(0, self._num_bytes):
            self.copies.to_device(here, there)
        return present

    @property
    def _copies_parts(self) -> bool:
        return not self.device.is_host

    def _copy_bucket(self, part: Node, number: int) -> None:
        super()._copy_bucket(part, number)
        self._leaving.add(self._buckets.indices[number], self.copies.issued())
        self._leaving.look(self._all_reduce.ready)  # where no lane's thread does

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        self._early, self._leaving = EarlyPart(self._parts), _LeavingGradients()
        self._all_reduce = HostAllReduce(self._team, self.memory, self.buffers, self._leaving.look)
        super()._bind(keys, live)

    def _load(self) -> None:
        self._leaving.clear()
        super()._load()

    def _plan_sum(self) -> None:
        lanes = self._cut(self._all_reduce.num_lanes)
        arena = self.memory.arena
        self._all_reduce.plan(self.division, lanes, (arena.memory, arena.sums.start))
        self.totals = self._all_sums()
        self._view_whole(self.totals)


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

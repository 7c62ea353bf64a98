"""Replicas whose parts travel through the host's memory; each worker adds up a slice of everything.

::

    worker 0   parts ──►┌────────┐──► slice 0 of all parts, added ──►┌────────┐──► all sums
                        │ host's │       in tree order               │ host's │
    worker 1   parts ──►│ memory │──► slice 1 of all parts, added ──►│ memory │──► all sums
                        └────────┘                                   └────────┘
                    gather: all meet                            add up: all meet

The way of accelerators, whose memory the other workers do not see: parts, slices and sums are
copied beside what the device computes, through memory that is pinned where it lies. Once all parts
are there, a worker that is lost takes nothing with it: the others add up its slice, too. A worker
alone copies nothing.

On CPUs it is slower than :mod:`unisono.engine.exchange.shared`, as everybody updates everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from unisono.engine.exchange.arena import (
    Block,
    Bytes,
    Region,
    Span,
    private_bytes,
    size_of,
    spans_of,
    within,
)
from unisono.engine.exchange.bucket_pipeline import BUCKET_BYTES
from unisono.engine.exchange.early_part import EarlyPart, PartBuckets
from unisono.engine.exchange.parts import (
    Gradients,
    OrderedSum,
    OwnParts,
    Parts,
    PublishedParts,
    pieces_within,
)
from unisono.engine.exchange.replicas import ReplicaExchange
from unisono.engine.exchange.shared_optimizer_state import StateKeys
from unisono.plan.summation import Node
from unisono.runtime.workers.launcher_messages import Live
from unisono.runtime.workers.memory import aligned


class StagedExchange(ReplicaExchange):
    """An exchange of replicas; arguments as of :class:`~.protocol.Exchange`."""

    _own: OwnParts
    _early: EarlyPart
    _fetched: list[Block]  # where others' parts come to
    _to_fetch: list[tuple[torch.Tensor, torch.Tensor]]

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`~.protocol.Exchange`."""
        if not self._copies_parts:
            super().publish(part, gradients)
        elif self._early.has_begun:
            self.copies.before_changes()
            self._buckets.mark_changed(self._early.complete(part, gradients))
            self._copy_part(part, self._buckets.rest())
        else:
            super().publish(part, gradients)
            self._copy_part(part, [(0, self._num_bytes)])

    @property
    def takes_early(self) -> bool:  # type: ignore[override]
        """See :class:`~.protocol.Exchange`; buckets are copied beside the backward pass."""
        return self._copies_parts

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """See :class:`~.protocol.Exchange`."""
        if not self._early.has_begun:
            self._buckets.begin()
        if self._buckets.has_given(index):
            self.copies.before_changes()
        self._early.put(part, index, gradient)
        for number in self._buckets.mark(index):
            self._copy_bucket(part, number)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`~.protocol.Exchange`."""
        self.copies.wait()
        return super().gather(purpose)

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`~.protocol.Exchange`; everybody has all sums then."""
        while True:
            self._fetch()
            present = self._sum.add()
            if self._team.size == 1:
                return present
            start, stop = self._slice
            for there, here in self._sums_within(start, stop):
                self.copies.to_host(there, here)
            self.copies.wait()
            if self._team.meet(purpose):
                break
            self._plan_sum()  # for those who are left; all parts are still there
        for first, last in ((0, start), (stop, self._num_bytes)):
            for there, here in self._sums_within(first, last):
                self.copies.to_device(here, there)
        return present

    def share(self, purpose: str) -> bool:
        """See :class:`~.protocol.Exchange`; all parts and sums have been read when all met."""
        return True

    def unbind(self) -> None:
        """See :class:`~.protocol.Exchange`."""
        try:
            self.copies.wait()
        finally:
            for undo in self._pinned.values():
                if undo is not None:
                    undo()
            super().unbind()

    def _pin(self, memory: torch.Tensor) -> None:
        """Pin memory of the host while the loop runs, unless it is."""
        if memory.data_ptr() not in self._pinned:
            self._pinned[memory.data_ptr()] = self.device.register(memory)

    @property
    def _copies_parts(self) -> bool:
        return self._team.size > 1 and not self.device.is_host

    def _copy_bucket(self, part: Node, number: int) -> None:
        """Copy a bucket while the backward pass goes on."""
        self._copy_part(part, [self._buckets.spans[number]])

    def _copy_part(self, part: Node, spans: Sequence[tuple[int, int]]) -> None:
        """Copy bytes of a part to where the others see them."""
        there, here = self.memory.arena.gradients[part.lo], self._own.memory(part.lo)
        self._pin(there.everything())
        for start, stop in spans:
            for first, last, _ in within(self._spans, start, stop):
                source = here.flat(first, last - first, torch.uint8)
                self.copies.to_host(there.everything()[first:last], source)

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        arena = self.memory.arena
        slots, num_bytes = arena.plan.parameters, size_of(arena.plan.parameters)
        self._pinned: dict[int, Callable[[], None] | None] = {}
        self._fetched, self._to_fetch = [], []
        self._sums_there = arena.sums.everything()
        for buffers in arena.buffers:
            self._pin(buffers.everything())
        self._num_bytes, self._spans = num_bytes, spans_of(slots, self.parameters)
        if not self.device.is_host:
            self._own = OwnParts(slots, num_bytes, self.device, self._divided)
            self._parts = Parts(arena.flags, self._own)
            self._early, self._buckets = EarlyPart(self._parts), PartBuckets(slots, BUCKET_BYTES)
        super()._bind(keys, live)

    def _plan_sum(self) -> None:
        team = self._team
        share = aligned(-(-self._num_bytes // team.size))
        start = min(share * team.position, self._num_bytes)
        self._slice = start, min(start + share, self._num_bytes)
        if team.size == 1:
            self._sum = OrderedSum(self._published(), self.pieces)
            self.totals = self._sum.totals
        else:
            pieces = list(pieces_within(self.memory.arena.plan.parameters, *self._slice))
            self._sum = OrderedSum(self._published(), pieces, self._sums.pieces(pieces))
            self.totals = self._all_sums()
        self._view_whole(self.totals)

    def _all_sums(self) -> list[torch.Tensor]:
        """View the sums that are copied here from the memory of all workers."""
        self._pin(self._sums_there)
        sums = self._sums
        return [sums.piece(n, 0, slot.numel) for n, slot in enumerate(sums.slots)]

    def _view_whole(self, totals: Sequence[torch.Tensor]) -> None:
        # A tensor without elements may lie between the bytes of two devices.
        slots = self.memory.arena.plan.parameters
        self.whole = [
            total.as_strided(slot.shape, slot.stride).to(parameter.device)
            for total, slot, parameter in zip(totals, slots, self.parameters, strict=True)
        ]

    @property
    def _divided(self) -> Sequence[Span]:
        """Where bytes of parts and sums are, if not on one device."""
        return self._spans if self.device.is_divided else ()

    @functools.cached_property
    def _sums_memory(self) -> Bytes:
        """All sums, where the parameters are; a worker alone has them where its part is."""
        return private_bytes(self._num_bytes, self.device, self._divided)

    @property
    def _sums(self) -> Region:
        return Region(self._sums_memory, 0, self.memory.arena.plan.parameters)

    def _sums_within(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self._within(self._sums_there, self._sums_memory, start, stop)

    def _within(
        self, there: torch.Tensor, here: Bytes, start: int, stop: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield some bytes in the memory of all workers, and the same bytes here, by device."""
        for first, last, _ in within(self._spans, start, stop):
            yield there[first:last], here.flat(first, last - first, torch.uint8)

    def _published(self) -> PublishedParts:
        """Return all parts to be added up; others' come from the host, only the slice of each."""
        nodes, arena = self.division.parts, self.memory.arena
        self._to_fetch, self._fetched = [], []
        if self.device.is_host:
            return self._parts.published(nodes)
        own = self.division.parts_of[self._team.world.rank]
        spans, regions = [*within(self._spans, *self._slice)], []
        for node in nodes:
            if node in own:
                regions.append(self._own[node.lo])
                continue
            there, block = arena.gradients[node.lo].everything(), Block(spans)
            self._pin(there)
            self._fetched.append(block)
            # As if the part lay there as a whole.
            regions.append(Region(block, 0, arena.plan.parameters))
            for start, stop, _ in spans:
                here = block.flat(start, stop - start, torch.uint8)
                self._to_fetch.append((here, there[start:stop]))
        return PublishedParts(nodes, [(arena.flags[node.lo],) for node in nodes], regions)

    def _fetch(self) -> None:
        """Copy others' parts to the device, once all are published."""
        for here, there in self._to_fetch:
            self.copies.to_device(here, there)

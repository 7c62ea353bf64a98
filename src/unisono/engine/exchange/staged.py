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
    Arena,
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
from unisono.engine.exchange.parts import Gradients, OrderedSum, OwnParts, Parts, pieces_within
from unisono.engine.exchange.replicas import ReplicaExchange
from unisono.engine.exchange.shared_optimizer_state import StateKeys
from unisono.plan.shards import Piece
from unisono.plan.summation import Node
from unisono.runtime.device import Copies
from unisono.runtime.workers.launcher_messages import Live
from unisono.runtime.workers.memory import aligned


class StagedExchange(ReplicaExchange):
    """An exchange of replicas; arguments as of :class:`~.protocol.Exchange`."""

    _own: OwnParts

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
        span = self._buckets.mark(index)
        if span is not None:
            self._copy_bucket(part, span)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`~.protocol.Exchange`."""
        self.copies.wait()
        return super().gather(purpose)

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`~.protocol.Exchange`; everybody has all sums then."""
        while True:
            if self._fetched is not None:
                self._fetched.fetch()
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
            self._pinned.release()
            super().unbind()

    @property
    def _copies_parts(self) -> bool:
        return self._team.size > 1 and not self.device.is_host

    def _copy_bucket(self, part: Node, span: tuple[int, int]) -> None:
        """Copy a bucket while the backward pass goes on."""
        self._copy_part(part, [span])

    def _copy_part(self, part: Node, spans: Sequence[tuple[int, int]]) -> None:
        """Copy bytes of a part to where the others see them."""
        there, here = self.memory.arena.gradients[part.lo], self._own.memory(part.lo)
        self._pinned.pin(there.everything())
        for start, stop in spans:
            for first, last, _ in within(self._spans, start, stop):
                source = here.flat(first, last - first, torch.uint8)
                self.copies.to_host(there.everything()[first:last], source)

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        arena = self.memory.arena
        slots, num_bytes = arena.plan.parameters, size_of(arena.plan.parameters)
        self._pinned = _Pinned(self.device.register)
        self._sums_there = arena.sums.everything()
        for buffers in arena.buffers:
            self._pinned.pin(buffers.everything())
        self._num_bytes, self._spans = num_bytes, spans_of(slots, self.parameters)
        if not self.device.is_host:
            self._own = OwnParts(slots, arena.flags, num_bytes, self.device, self._divided)
            self._parts = Parts(self._own)
            self._early, self._buckets = EarlyPart(self._parts), PartBuckets(slots, BUCKET_BYTES)
        super()._bind(keys, live)

    def _plan_sum(self) -> None:
        team, division = self._team, self.division
        parts, slots = division.parts, self.memory.arena.plan.parameters
        share = aligned(-(-self._num_bytes // team.size))
        start = min(share * team.position, self._num_bytes)
        self._slice = start, min(start + share, self._num_bytes)
        self._fetched = None if self.device.is_host else self._fetched_parts()
        published = self._fetched or self._parts
        if team.size == 1:
            self._sum = OrderedSum(published, parts, self.pieces)
            self.totals = self._sum.totals
        else:
            pieces = list(pieces_within(slots, *self._slice))
            into = self._sums.pieces(pieces)
            self._sum = OrderedSum(published, parts, pieces, into)
            self.totals = self._all_sums()
        self._view_whole(self.totals)

    def _all_sums(self) -> list[torch.Tensor]:
        """View the sums that are copied here from the memory of all workers."""
        self._pinned.pin(self._sums_there)
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
        """Give some bytes in the memory of all workers, and the same bytes here, by device."""
        for first, last, _ in within(self._spans, start, stop):
            yield there[first:last], here.flat(first, last - first, torch.uint8)

    def _fetched_parts(self) -> FetchedParts:
        arena, division = self.memory.arena, self.division
        own = {part.lo for part in division.parts_of[self._team.world.rank]}
        others = [part.lo for part in division.parts if part.lo not in own]
        for lo in others:
            self._pinned.pin(arena.gradients[lo].everything())
        spans = [*within(self._spans, *self._slice)]
        return FetchedParts(self.copies, spans, arena, self._own, others)


class FetchedParts:
    """A slice of all parts on a device: this worker's are there, others come from the host. Final.

    Args:
        copies: between the device and the host.
        spans: the bytes of the slice, and where they are to be.
        arena: where the others' parts lie.
        own: this worker's.
        others: the first shards of the others'.

    Attributes:
        blocks: what was copied, by first shard.
    """

    def __init__(
        self,
        copies: Copies,
        spans: Sequence[Span],
        arena: Arena,
        own: OwnParts,
        others: Sequence[int],
    ) -> None:
        self._copies, self._own, self._flags = copies, own, arena.flags
        # As if each part lay there as a whole: only its slice does.
        blocks = self.blocks = {lo: Block(spans) for lo in others}
        self._regions = {lo: Region(b, 0, arena.plan.parameters) for lo, b in blocks.items()}
        self._to_copy = [
            (
                block.flat(start, stop - start, torch.uint8),
                arena.gradients[lo].everything()[start:stop],
            )
            for lo, block in blocks.items()
            for start, stop, _ in spans
        ]

    def fetch(self) -> None:
        """Copy the others' to the device, once all are published."""
        for into, source in self._to_copy:
            self._copies.to_device(into, source)

    def flags(self, lo: int) -> bytes:
        """See :class:`~.parts.PublishedParts`."""
        return bytes(self._flags[lo])

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """See :class:`~.parts.PublishedParts`."""
        return (self._regions.get(lo) or self._own[lo]).pieces(pieces)


class _Pinned:
    """Memory of the host that is pinned while a loop runs. Final."""

    def __init__(self, register: Callable[[torch.Tensor], Callable[[], None] | None]) -> None:
        self._register = register
        self._undo: dict[int, Callable[[], None] | None] = {}

    def pin(self, memory: torch.Tensor) -> None:
        """Pin memory, unless it is."""
        if memory.data_ptr() not in self._undo:
            self._undo[memory.data_ptr()] = self._register(memory)

    def release(self) -> None:
        """Undo all."""
        for undo in self._undo.values():
            if undo is not None:
                undo()
        self._undo.clear()

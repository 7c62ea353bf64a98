"""Exchange parts through the memory of the host; each worker adds up some pieces of all parts.

::

    worker 0   parts ──►┌────────┐──► pieces of all parts, added ──►┌────────┐──► all sums, if
                        │ host's │       in tree order              │ host's │    all are needed
    worker 1   parts ──►│ memory │──► pieces of all parts, added ──►│ memory │──►
                        └────────┘                                  └────────┘
                    gather: barrier                             spread: barrier

On CPUs parts lie in that memory (:class:`_InArena`), and are read where they lie. An accelerator's
memory is not visible to other workers (:class:`_OnDevice`): parts, pieces and sums are copied
while the device computes, through memory that is pinned in place. Once all parts are in the host's
memory, losing a worker loses no data: the others add up its pieces. A single worker copies nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import final

import torch
from typing_extensions import override

from unisono.engine.exchange.arena import Block, Bytes, Region, within
from unisono.engine.exchange.between import Between
from unisono.engine.exchange.bucket_pipeline import BUCKET_BYTES
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.early_part import EarlyPart, PartBuckets
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.parts import Gradients, OwnParts, Parts, PublishedParts
from unisono.plan.shards import Piece
from unisono.plan.summation import Node
from unisono.runtime.workers.memory import ALIGNMENT_BYTES


@final
class HostMemoryCarriage(Carriage):
    """Carries parts through memory that all workers of a host share.

    `pieces` are this worker's lane, or everything if the sums are needed everywhere.
    """

    def __init__(self, layout: LoopLayout, between: Between) -> None:
        super().__init__(layout)
        self._between, self._copies = between, layout.copies
        is_host = layout.device.is_host
        self._parts: _InArena | _OnDevice
        self._parts = (_InArena if is_host else _OnDevice)(layout, between)
        self._host_sums = self.arena.sums.everything()
        self._here: Bytes | None = None  # where sums of own pieces come to from the host's memory

    @property
    @override
    def takes_early(self) -> bool:
        return self._parts.takes_early

    @override
    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        self._between.begin()
        self._parts.publish_early(part, index, gradient)

    @override
    def publish(self, part: Node, gradients: Gradients) -> None:
        self._parts.publish(part, gradients)

    @override
    def forget_step(self) -> None:
        self._parts.forget_step()

    @override
    def gather(self, purpose: str) -> bool:
        self._between.begin()
        self._copies.wait()
        return self._between.gather(purpose)

    @override
    def plan(self, *, everywhere: bool) -> None:
        layout, number = self.layout, self._between.number
        self._is_everywhere, is_alone = everywhere, self.team.size == 1
        lanes = layout.cut(self._between.num_lanes)
        if everywhere and is_alone:
            lanes = [layout.whole_pieces]
        own = [] if number is None else lanes[number]
        self._mine = self._bytes_of(own)
        # At least some bytes, since tensors without elements must also be on their device.
        start = max(0, min(self._mine[0], layout.num_bytes - ALIGNMENT_BYTES))
        self._fetched = start, max(self._mine[1], start + ALIGNMENT_BYTES)
        self._here = None
        self._own_there = self.arena.sums.pieces(own)
        into = self._sums.pieces(own) if everywhere and not is_alone else None
        totals = self._between.plan(lanes, self, into)
        if everywhere:
            self.pieces = layout.whole_pieces
            self.totals = totals if is_alone else self._view_sums()
            self._view_whole(self.totals)
        else:
            self.pieces, self.totals = own, totals
            self.whole = self._between.sums.tensors()

    @override
    def add_up(self, purpose: str) -> tuple[bool, ...]:
        while True:
            present = self._between.add_up(self)
            if not self._is_everywhere or self.team.size == 1:
                return present
            if self._between.spread(self, purpose):
                return present
            self.plan(everywhere=True)  # for those who are left; all parts are still there

    def spread_sums(self, purpose: str) -> bool:
        """Copy the sums of all pieces to :attr:`whole`; return False if a worker was lost."""
        self._view_whole(self._view_sums())
        self.copy_sums_to_host()
        if not self.team.meet(purpose):
            return False
        self.copy_sums_from_host(with_own=True)
        return True

    def take_changed_sums(self) -> None:
        """Copy changes of :attr:`whole` to :attr:`totals`."""
        for total, there in zip(self.totals, self._sums.pieces(self.pieces), strict=True):
            total.copy_(there)
        self._copies.wait()

    def spread(self, there: torch.Tensor, here: Bytes, purpose: str) -> bool:
        """Exchange this worker's pieces for the others'; return False if one was lost.

        Args:
            there: memory of the host, laid out like a part.
            here: memory of this worker, with the same layout.
        """
        for place, source in self.layout.within(there, here, *self._mine):
            self._copies.to_host(place, source)
        self._copies.wait()
        if not self.team.meet(purpose):
            return False
        for span in self._others:
            for source, place in self.layout.within(there, here, *span):
                self._copies.to_device(place, source)
        return True

    @override
    def published(self) -> PublishedParts:
        return self._parts.published(self._fetched)

    @override
    def fetch(self) -> None:
        self._parts.fetch()

    @override
    def host_sums(self, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        if self.layout.device.is_host:
            return self._own_there
        self.layout.pin(self._host_sums)
        self._here = here = Block([*within(self.layout.spans, *self._fetched)])
        return Region(here, 0, self.arena.plan.parameters).pieces(pieces)

    @override
    def fetch_sums(self) -> None:
        if self._here is not None:
            for source, place in self.layout.within(self._host_sums, self._here, *self._mine):
                self._copies.to_device(place, source)

    @override
    def copy_sums_to_host(self) -> None:
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
        if self._is_everywhere:  # they lie as they do there
            pairs = self.layout.within(self._host_sums, self._sums_memory, *self._mine)
        else:
            pairs = zip(self._own_there, self.totals, strict=True)
        for there, here in pairs:
            self._copies.to_host(there, here)
        self._copies.wait()

    @override
    def copy_sums_from_host(self, *, with_own: bool) -> None:
        for span in [(0, self.layout.num_bytes)] if with_own else self._others:
            for source, place in self.layout.within(self._host_sums, self._sums_memory, *span):
                self._copies.to_device(place, source)

    @override
    def await_readers(self, purpose: str) -> None:
        """Return at once: all workers had read parts and sums when they exchanged the sums."""

    def release_parts(self) -> None:
        """Release the memory of parts on a device, once all workers have read them."""
        self._parts.release()

    @override
    def close(self) -> None:
        try:
            self._copies.wait()
        finally:
            self.layout.unpin()

    @property
    def _others(self) -> list[tuple[int, int]]:
        """The bytes of a part before and behind this worker's pieces."""
        return [(0, self._mine[0]), (self._mine[1], self.layout.num_bytes)]

    def _bytes_of(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        if not pieces:
            return 0, 0
        slots = self.arena.plan.parameters
        first, last = (slots[piece.index] for piece in (pieces[0], pieces[-1]))
        start = first.offset + first.dtype.itemsize * pieces[0].start
        return start, last.offset + last.dtype.itemsize * pieces[-1].stop

    @functools.cached_property
    def _sums_memory(self) -> Bytes:
        """Memory for all sums, on the parameters' devices."""
        return self.layout.allocate()

    @property
    def _sums(self) -> Region:
        return Region(self._sums_memory, 0, self.arena.plan.parameters)

    def _view_sums(self) -> list[torch.Tensor]:
        self.layout.pin(self._host_sums)
        return self._sums.pieces(self.layout.whole_pieces)

    def _view_whole(self, totals: Sequence[torch.Tensor]) -> None:
        # A tensor without elements may lie between the bytes of two devices.
        slots = self.arena.plan.parameters
        self.whole = [
            total.as_strided(slot.shape, slot.stride).to(parameter.device)
            for total, slot, parameter in zip(totals, slots, self.layout.parameters, strict=True)
        ]


@final
class _InArena:
    """Parts in memory that all workers of the host share."""

    def __init__(self, layout: LoopLayout, between: Between) -> None:
        self._layout, self._between = layout, between
        self._parts = Parts(layout.memory.arena.flags, layout.memory.arena.gradients)
        self._early = EarlyPart(self._parts)
        self.takes_early = between.takes_early

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        self._early.put(part, index, gradient)
        self._between.mark(index)

    def publish(self, part: Node, gradients: Gradients) -> None:
        self._between.mark_changed(self._early.publish(part, gradients))

    def forget_step(self) -> None:
        self._early.forget()

    def published(self, span: tuple[int, int]) -> PublishedParts:
        return self._parts.published(self._layout.division.parts)

    def fetch(self) -> None:
        pass

    def release(self) -> None:
        pass


@final
class _OnDevice:
    """This worker's parts on its device, copied to memory that all workers of the host share."""

    def __init__(self, layout: LoopLayout, between: Between) -> None:
        self._layout, self._between, self._copies = layout, between, layout.copies
        self._arena = arena = layout.memory.arena
        slots, spans = arena.plan.parameters, layout.spans if layout.device.is_divided else ()
        self._own = OwnParts(slots, layout.num_bytes, layout.device, spans)
        self._parts = Parts(arena.flags, self._own)
        self._early, self._buckets = EarlyPart(self._parts), PartBuckets(slots, BUCKET_BYTES)
        self._blocks: list[Block] = []  # where others' parts come to
        self._to_fetch: list[tuple[torch.Tensor, torch.Tensor]] = []
        for buffers in arena.buffers:
            layout.pin(buffers.everything())

    @property
    def takes_early(self) -> bool:
        """Whether other workers read parts of this one; buckets are copied as they are full."""
        return self._layout.team.size > 1

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        if not self._early.has_begun:
            self._buckets.begin()
        if self._buckets.is_complete(index):
            self._copies.before_changes()
        self._early.put(part, index, gradient)
        for number in self._buckets.mark(index):
            self._copy(part, [self._buckets.spans[number]])
            self._between.mark_copied(self._buckets.indices[number], self._copies.issued())

    def publish(self, part: Node, gradients: Gradients) -> None:
        has_begun = self._early.has_begun
        if has_begun:
            self._copies.before_changes()
        changed = self._early.publish(part, gradients)
        if has_begun:
            self._buckets.mark_changed(changed)
            self._copy(part, self._buckets.rest())
            if self._buckets.changed:
                self._between.mark_copied_again()
        elif self.takes_early:
            self._copy(part, [(0, self._layout.num_bytes)])

    def forget_step(self) -> None:
        self._early.forget()

    def published(self, span: tuple[int, int]) -> PublishedParts:
        layout, arena, nodes = self._layout, self._arena, self._layout.division.parts
        self._to_fetch, self._blocks = [], []
        own = layout.division.parts_of[layout.team.world.rank]
        spans, regions = [*within(layout.spans, *span)], []
        for node in nodes:
            if node in own:
                regions.append(self._own[node.lo])
                continue
            there, block = arena.gradients[node.lo].everything(), Block(spans)
            layout.pin(there)
            self._blocks.append(block)
            # As if the part lay there as a whole.
            regions.append(Region(block, 0, arena.plan.parameters))
            for start, stop, _ in spans:
                here = block.flat(start, stop - start, torch.uint8)
                self._to_fetch.append((here, there[start:stop]))
        return PublishedParts(nodes, [(arena.flags[node.lo],) for node in nodes], regions)

    def fetch(self) -> None:
        for here, there in self._to_fetch:
            self._copies.to_device(here, there)

    def release(self) -> None:
        for block in (*self._own.blocks, *self._blocks):
            block.release()

    def _copy(self, part: Node, spans: Sequence[tuple[int, int]]) -> None:
        there, here = self._arena.gradients[part.lo].everything(), self._own.memory(part.lo)
        self._layout.pin(there)
        for span in spans:
            for place, source in self._layout.within(there, here, *span):
                self._copies.to_host(place, source)

"""Exchange sums between several hosts, with any carriage and ownership.

Parameters are cut into lanes, one for each worker of the smallest host. Worker i of every host adds
up lane i, together with the others of lane i::

    host 0   sums of its shards ─┐      ┌─► slice 0 of all, added ─┐      ┌─► lane i
                                 │ swap │       in tree order      │ swap │
    host 1   sums of its shards ─┘      └─► slice 1 of all, added ─┘      └─► lane i

Before, each host adds up its workers' parts as far as the tree allows: with 2ʲ shards on each host
one part of each crosses, as in a ring all-reduce over the hosts. A lane crosses in buckets
(``host_bucket.py``), each as soon as all workers of the host have left its gradients in the host's
memory (``early_part.py``), in a separate thread (``host_lane.py``). Records of shards and flags of
parts are sent with the workers' arrivals at the barrier.

After a loss all workers start again at the newest snapshot, which each host has, so no worker needs
to know how far a step had come.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch
from typing_extensions import override

from unisono.engine.exchange.between import Between
from unisono.engine.exchange.bucket_pipeline import BucketPipeline, lay_out_lane
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.communicator import BrokenError
from unisono.engine.exchange.division import Division
from unisono.engine.exchange.host_bucket import HostBucket, LaneMemory
from unisono.engine.exchange.host_lane import HostLane, LaneTurn, Views, connect_lane
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.moving import Moving
from unisono.engine.exchange.parts import presence
from unisono.engine.exchange.ready_buckets import ReadyBuckets
from unisono.errors import UnisonoError
from unisono.plan.shards import Piece
from unisono.plan.summation import Node, parts_of
from unisono.runtime.timeouts import MEETING
from unisono.runtime.workers.host_links import LOST_AFTER_S

_ROWS, _FLAGS = 0, 1
_ITEM = struct.Struct("<III")  # rows or flags, which shard's, how many bytes
_KEPT, _CHANGED, _MOVED = 1, 2, 4  # buffers; published gradients; fixed parameters
_SLICE_BYTES = 1 << 19  # of a bucket, for each host
_LOOK_EVERY_S = 0.05
_LATE = "within {:g} s (UNISONO_MEETING_TIMEOUT), another host has not moved all of them"


@final
class Lanes(Between):
    """Exchanges the data of one worker with the workers of other hosts, in one loop.

    Attributes:
        lane: connects the workers of this one's lane; None if its host has more workers than
            another and this worker has no lane, or once it is closed.
        ready: counts the gradients that this worker has left in the memory of its host.
    """

    takes_early = True  # also on CPUs
    lane: HostLane | None = None
    ready: ReadyBuckets
    _division: Division
    _buckets: Sequence[HostBucket] = ()
    _pipeline: BucketPipeline
    _turn: LaneTurn | None = None
    _num_turns = 0
    _has_begun = _is_outdated = _has_moved = False
    _kept_on: int | None = None

    def __init__(self, layout: LoopLayout) -> None:
        self._layout, self._team, self._memory = layout, layout.team, layout.memory
        self._arena, self._buffers = layout.memory.arena, layout.buffers
        self.sums = self._arena.sums
        self._copied = _CopiedGradients()
        self._position, _ = layout.share
        if self._team.leads_host:
            for count in self._arena.counts:
                count[:] = bytes(len(count))
        try:
            self.lane = connect_lane(self._team, self._lane_ranks)
        except BrokenError as error:
            self._check(str(error))

    @property
    @override
    def num_lanes(self) -> int:
        return min(map(len, self._team.hosts))

    @property
    @override
    def number(self) -> int | None:
        return self._position if self._position < self.num_lanes else None

    @override
    def share(self, views: Callable[[], Sequence[memoryview]]) -> None:
        shared = views()
        if self.number == 0:
            for view in shared:
                self.send_from(0, view)
        self._team.meet("sharing parameters")

    @override
    def leave(self) -> None:
        if self.lane is not None:
            self.lane.leave()
            if self._turn is not None:
                self._turn.join()
            self.lane.close()
        self.lane = self._turn = None

    @override
    def plan(
        self,
        lanes: Sequence[Sequence[Piece]],
        carriage: Carriage,
        into: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        self._division = division = self._layout.division
        team, arena, number = self._team, self._arena, self.number
        slots, bucket_bytes = arena.plan.parameters, _SLICE_BYTES * len(team.hosts)
        layouts = [lay_out_lane(slots, pieces, bucket_bytes) for pieces in lanes]
        # The lane of each bucket, in sending order: the last parameters first.
        self._leaving = [at for at in reversed(range(len(lanes))) for _ in layouts[at]]
        self.ready = ReadyBuckets(
            arena.counts[: len(team.neighbours)],
            self._position,
            [bucket.indices for layout in reversed(layouts) for bucket in layout],
        )
        self._buckets = []
        if number is not None and layouts[number]:
            held = [self._parts_on(ranks) for ranks in team.hosts]
            memory = LaneMemory(arena, held, team.host, division.parts)
            buckets = enumerate(layouts[number])
            self._buckets = [HostBucket(bucket, at, memory) for at, bucket in buckets]
            self._pipeline = BucketPipeline([bucket.transfer for bucket in self._buckets])
        if into is not None:
            return into
        return carriage.host_sums([] if number is None else lanes[number])

    @override
    def mark(self, index: int) -> None:
        self.ready.mark(index)

    @override
    def mark_changed(self, indices: Sequence[int]) -> None:
        self.ready.mark_changed(indices)

    @override
    def mark_copied(self, indices: Sequence[int], are_made: Callable[[], bool]) -> None:
        self._copied.add(indices, are_made)
        self._copied.poll(self.ready)  # where no lane's thread does

    @override
    def mark_copied_again(self) -> None:
        self.ready.is_outdated = True

    @override
    def add_up(self, carriage: Carriage) -> tuple[bool, ...]:
        present = self._finish()
        carriage.fetch_sums()
        return present

    @override
    def spread(self, carriage: Carriage, purpose: str) -> bool:
        self._team.meet(purpose)
        carriage.copy_sums_from_host(with_own=True)
        return True

    @override
    def begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self.ready.begin()
        if self.lane is None or not self._buckets:
            return
        self._num_turns += 1
        self._pipeline.begin()
        for bucket in self._buckets:
            bucket.expect(self.lane, self._num_turns)
        self._turn = LaneTurn(
            self._pipeline, self.lane, self.ready, self._num_ready, len(self._buckets)
        )

    @override
    def gather(self, purpose: str, meanwhile: Callable[[], None] | None = None) -> bool:
        """Wait for every worker; after that this host has the records of all shards."""
        self.begin()
        self._copied.clear()
        self.ready.mark_all()
        team = self._team
        team.attach(b"".join(self._own_records()))
        mine = _KEPT * self._buffers.is_kept_here + _CHANGED * self.ready.is_outdated
        moving = self._buffers.moving
        mine += _MOVED * (moving is not None and moving.is_kept_here)
        votes = team.vote(mine, purpose)
        assert votes is not None, "where workers are on several hosts, a loss is an exception"
        for said in team.attached().values():
            self._store_records(said)
        on_host = [[votes[rank] for rank in ranks] for ranks in team.hosts]
        self._is_outdated = any(vote & _CHANGED for own in on_host for vote in own)
        kept = (host for host, own in enumerate(on_host) if any(vote & _KEPT for vote in own))
        self._kept_on = next(kept, None)
        self._has_moved = any(vote & _MOVED for vote in votes.values())
        return True

    def _finish(self) -> tuple[bool, ...]:
        """Wait for the sums of this worker's lane and the buffers of other hosts."""
        self._end()
        if self._is_outdated:
            self.begin()
            self.ready.mark_all()
            self._end()
        if self.lane is not None and self._team.leads_host:
            self._send_buffers()
        flags = self._arena.flags
        rows = [presence(bytes(flags[part.lo])) for part in self._division.parts]
        return tuple(any(column) for column in zip(*rows, strict=True))

    def send_from(self, host: int, here: memoryview) -> None:
        """Copy bytes from one host to the same place on all others."""
        others = set(range(len(self._team.hosts))) - {host}
        if self._team.host == host:
            self._swap({other: [here] for other in others}, {})
        else:
            self._swap({}, {host: [here]})

    def _swap(self, sent: Mapping[int, Views], into: Mapping[int, Views]) -> None:
        lane = self.lane
        assert lane is not None
        self._num_turns += 1
        number = self._num_turns << 32
        try:
            lane.expect(number, into)
            swap = lane.swap(number, sent)  # sends at once what the kernel takes
            limit_s = MEETING.in_s()
            until_s = time.monotonic() + limit_s
            while not lane.wait(swap, _LOOK_EVERY_S):
                if self._team.has_lost:
                    raise BrokenError("a worker was lost")
                if time.monotonic() > until_s:
                    raise BrokenError(_LATE.format(limit_s))
        except BrokenError as error:
            self._check(str(error))

    @property
    def _lane_ranks(self) -> list[int]:
        return [] if self.number is None else [ranks[self.number] for ranks in self._team.hosts]

    def _num_ready(self) -> int:
        """Return how many buckets of this worker's lane can be sent."""
        self._copied.poll(self.ready)
        return self._leaving[: self.ready.count()].count(self._position)

    def _end(self) -> None:
        """Wait until all buckets of this worker's lane are exchanged."""
        self._has_begun = False
        turn, lane = self._turn, self.lane
        if turn is None or lane is None:
            return
        limit_s, late = MEETING.in_s(), ""
        until_s = time.monotonic() + limit_s
        while turn.is_alive():
            turn.join(_LOOK_EVERY_S)
            if time.monotonic() > until_s:
                late = late or _LATE.format(limit_s)
            if late or self._team.has_lost:
                lane.leave()
        self._turn = None
        if turn.error is not None:
            raise turn.error
        self._check(late or self._pipeline.failure)

    def _parts_on(self, ranks: Sequence[int]) -> list[Node]:
        held = [part for rank in ranks for part in self._division.parts_of[rank]]
        return parts_of(range(held[0].lo, held[-1].hi), self._division.num_shards)

    def _own_records(self) -> Iterator[bytes]:
        """Yield the records and flags of this worker's shards, without trailing zeros."""
        arena, division = self._arena, self._division
        for kind, rows, numbers in (
            (_ROWS, arena.rows, list(division.shards)),
            (_FLAGS, arena.flags, [part.lo for part in division.mine]),
        ):
            for number in numbers:
                row = bytes(rows[number]).rstrip(b"\0")
                yield _ITEM.pack(kind, number, len(row)) + row

    def _store_records(self, said: bytes) -> None:
        """Store records and flags of another host's shards; all workers of this host do so."""
        arena, at = self._arena, 0
        while at < len(said):
            kind, number, num_bytes = _ITEM.unpack_from(said, at)
            at += _ITEM.size
            row = (arena.rows if kind == _ROWS else arena.flags)[number]
            row[:] = said[at : at + num_bytes].ljust(len(row), b"\0")
            at += num_bytes

    def _send_buffers(self) -> None:
        """Copy the buffers that one host keeps for the next step to the others."""
        if self._buffers.slots and self._kept_on is not None:
            region = self._arena.buffers[1 - self._buffers.now]
            num_bytes = region.everything().numel()
            self.send_from(self._kept_on, self._arena.memory.view(region.start, num_bytes))
        if self._buffers.moving is not None and self._kept_on is not None:
            self._send_moved(self._buffers.moving, self._kept_on)

    def _send_moved(self, moving: Moving, host: int) -> None:
        """Copy the parameters that passes have moved on one host to the others."""
        copy = 1 - self._buffers.now
        if self._has_moved:
            self.send_from(host, moving.flags(copy))
            for start, stop in moving.bytes_kept(copy):
                self.send_from(host, self._arena.memory.view(start, stop - start))
        elif self._team.host != host:
            moving.flags(copy)[:] = bytes(len(moving.flags(copy)))

    def _check(self, failure: str) -> None:
        """Raise an error that names the lost worker, or else the failure."""
        if not failure:
            return
        # A worker that has closed its connection may not be known to be lost yet.
        until_s = time.monotonic() + LOST_AFTER_S
        while not self._team.has_lost and time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
        self._team.stop_if_lost()
        raise UnisonoError(
            f"hosts must be connected, but sums could not be sent between them ({failure}): see "
            f"to the link and start all again; with a `directory` the run continues from its "
            f"newest checkpoint."
        )


@final
class _CopiedGradients:
    """Gradients of a step that are being copied from a device to the host's memory."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Sequence[int], Callable[[], bool]]] = deque()
        self._polling = threading.Lock()

    def add(self, indices: Sequence[int], are_made: Callable[[], bool]) -> None:
        """Record parameters whose gradients are being copied; `are_made` polls the copy."""
        self._copies.append((indices, are_made))

    def poll(self, ready: ReadyBuckets) -> None:
        """Mark gradients that have arrived; any thread may call this."""
        with self._polling:
            while self._copies and self._copies[0][1]():
                for index in self._copies.popleft()[0]:
                    ready.mark(index)

    def clear(self) -> None:
        """Discard all; no thread marks any once this returns."""
        with self._polling:
            self._copies.clear()

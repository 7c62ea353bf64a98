"""An exchange for workers of several hosts, each host with one copy of the parameters.

Inside a host all is as in ``shared.py``. Parameters are cut into lanes, one for each worker of the
smallest host. Worker i of every host adds up lane i, together with the others of lane i::

    host 0   sums of its shards ─┐      ┌─► slice 0 of all, added ─┐      ┌─► lane i
                                 │ swap │       in tree order      │ swap │
    host 1   sums of its shards ─┘      └─► slice 1 of all, added ─┘      └─► lane i

Before, each host adds up its workers' parts as far as the tree allows: with 2ʲ shards on each host
one part of each crosses, which is what a ring all-reduce over the hosts would send. A lane crosses
in buckets (``host_bucket.py``), each as soon as the last backward passes of all workers of the host
have left its gradients (``ready_buckets.py``), in a thread of its own (``lane_turn.py``).

What a shard has to say beside its gradients travels with the arrivals at the meeting of all.

A lost worker is replaced on its host, and then all go back to the newest snapshot, which each host
has: what others have of a step under way is dropped, so nobody has to know how far it had come.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch

from unisono.device import bytes_of
from unisono.errors import UnisonoError
from unisono.exchange.arena import Region
from unisono.exchange.bucket_layout import lay_out_lane
from unisono.exchange.bucket_pipeline import BucketPipeline
from unisono.exchange.communicator import BrokenError
from unisono.exchange.compressed_sums import CompressedSum
from unisono.exchange.early_part import EarlyPart
from unisono.exchange.homes import StateKeys
from unisono.exchange.host_bucket import HostBucket, LaneMemory
from unisono.exchange.host_lane import HostLane, connect_lane
from unisono.exchange.lane_transfers import LaneTransfers, Views
from unisono.exchange.lane_turn import LaneTurn
from unisono.exchange.parts import Gradients, presence
from unisono.exchange.ready_buckets import ReadyBuckets
from unisono.exchange.shared import SharedExchange
from unisono.plan.groups import groups_on
from unisono.plan.slices import cut
from unisono.plan.summation import Node, parts_of
from unisono.workers.host_links import LOST_AFTER_S
from unisono.workers.launcher_messages import Live
from unisono.workers.team import StepBrokenError

_ROWS, _FLAGS = 0, 1
_ITEM = struct.Struct("<III")  # rows or flags, which shard's, how many bytes
_BESIDE = struct.Struct("<??")  # whether buffers are kept here, whether gradients have changed
_SLICE_BYTES = 1 << 19  # of a bucket, for each host
_LOOK_EVERY_S = 0.05


class HostsExchange(SharedExchange):
    """An exchange between hosts. Final; arguments as of :class:`Exchange`."""

    _lane: HostLane | None = None
    _turn: LaneTurn | None = None
    _num_turns = 0
    _has_begun = False
    _kept_on: int | None = None

    @property
    def is_lost(self) -> bool:
        """See :class:`Exchange`; whoever was lost, all go back."""
        return self._team.membership.generation != self._generation

    def trust_leader(self) -> None:
        """See :class:`Exchange`."""
        super().trust_leader()
        self._generation = self._team.membership.generation

    @property
    def acts(self) -> bool:
        """See :class:`Exchange`; where one worker updates for all, one of each host does."""
        return self.have_all or self._team.leads_host

    @property
    def takes_early(self) -> bool:  # type: ignore[override]
        """See :class:`Exchange`; what is made smaller first crosses behind the passes."""
        return self.link is None

    @property
    def is_spread(self) -> bool:  # type: ignore[override]
        """See :class:`Exchange`."""
        return self.link is not None

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        self._begin_turn()
        self._early.put(part, index, gradient)
        self._ready.mark(index)

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`Exchange`."""
        if self._early.has_begun:
            self._ready.mark_changed(self._early.complete(part, gradients))
        else:
            super().publish(part, gradients)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`Exchange`; afterwards this host knows what all shards have to say."""
        team = self._team
        if self.link is None:
            self._begin_turn()
            self._ready.mark_all()
        is_kept_here, is_outdated = self.buffers.is_kept_here, self._ready.is_outdated
        team.put_beside(_BESIDE.pack(is_kept_here, is_outdated) + b"".join(self._told()))
        team.meet(purpose)
        self._kept_on = team.host if is_kept_here else None
        for rank, said in team.beside().items():
            is_kept_there, is_outdated_there = _BESIDE.unpack_from(said)
            self._hear(said[_BESIDE.size :])
            is_outdated |= is_outdated_there
            if is_kept_there:
                self._kept_on = next(at for at, ranks in enumerate(team.hosts) if rank in ranks)
        self._is_outdated = is_outdated
        return None

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`."""
        if self.link is not None:
            self._sum.add()
        else:
            self._cross()
        if self._lane is not None and self._team.leads_host:
            self._send_buffers()
        flags = self.memory.arena.flags
        rows = [presence(bytes(flags[part.lo])) for part in self.division.parts]
        return tuple(any(column) for column in zip(*rows, strict=True))

    def _cross(self) -> None:
        """Have all sums here, once those of the turn under way are, or of another one."""
        self._end_turn()
        if self._is_outdated:
            self._begin_turn()
            self._ready.mark_all()
            self._end_turn()

    def all_sums(self, purpose: str) -> bool:
        """See :class:`Exchange`."""
        everywhere = self.memory.arena.gradients[0]
        for piece, total in zip(self.pieces, self.totals, strict=True):
            everywhere.piece(piece.index, piece.start, piece.stop).copy_(total)
        return super().all_sums(purpose)

    def collect(self) -> None:
        """See :class:`Exchange`."""
        if self.link is None or not isinstance(self._sum, CompressedSum):
            return
        if self._lane is not None:
            for host in range(len(self._team.hosts)):
                for tensor in self._sum.kept_by(host):
                    self._send_from(host, bytes_of(tensor))
        self._team.meet("state of a slow link")

    def bring(self, of_host: Sequence[Views]) -> None:
        """See :class:`Exchange`; each lane brings some."""
        team, number = self._team, self._lane_number
        if number is not None:
            into = {host: views[number :: self._num_lanes] for host, views in enumerate(of_host)}
            own = into.pop(team.host)
            self._swap(dict.fromkeys(into, own), into)
        team.meet("values of other hosts")

    def hand_round(self) -> None:
        """See :class:`Exchange`; one worker of each host has the state."""
        if self.have_all:
            return
        team = self._team
        said = self._describe_optimizer() if team.leads_host else b""
        heard = team.gather(said, "end of a loop")
        if heard[team.neighbours[0]] and not team.leads_host:
            self._take_described()

    def unbind(self) -> None:
        """See :class:`Exchange`."""
        self._leave_lane()
        self._team.supervisor.newest_snapshot = None
        super().unbind()

    def _flip_published(self) -> None:
        super()._flip_published()
        self._ready.is_outdated = True

    @property
    def _lane_number(self) -> int | None:
        """Which lane is this worker's; None where its host has more workers than another."""
        own = self._team.neighbours.index(self._team.world.rank)
        return own if own < self._num_lanes else None

    @property
    def _num_lanes(self) -> int:
        return min(map(len, self._team.hosts))

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        self._early = EarlyPart(self._parts)
        if self._team.leads_host:
            for count in self.memory.arena.counts:
                count[:] = bytes(len(count))
        super()._bind(keys, live)

    def _bring_to_hosts(self) -> None:
        """Connect the lanes, and bring the first host's state to the others."""
        team = self._team
        self._connect_lane()
        if self._lane is not None and self._lane_number == 0:
            for start, stop in self.memory.arena.state_spans(0):
                self._send_from(0, self.memory.arena.memory.view(start, stop - start))
        team.meet("sharing parameters")
        team.supervisor.newest_snapshot = lambda: self.memory.snapshots.number

    def _connect_lane(self) -> None:
        team, number = self._team, self._lane_number
        self._leave_lane()
        try:
            ranks = [] if number is None else [ranks[number] for ranks in team.hosts]
            self._lane = connect_lane(team, ranks)
        except BrokenError as error:
            self._check(str(error))

    def _leave_lane(self) -> None:
        """Drop the exchange under way, if there is one."""
        if self._lane is not None:
            self._lane.leave()
            if self._turn is not None:
                self._turn.join()
            self._lane.close()
        self._lane, self._turn = None, None
        self._num_turns, self._has_begun = 0, False

    def _put_back(self) -> None:
        team, here = self._team, self._team.neighbours
        supervisor, snapshots = team.supervisor, self.memory.snapshots
        supervisor.newest_snapshot = lambda: snapshots.number
        supervisor.can_go_back, is_back = True, False
        position = here.index(team.world.rank)
        while not is_back:
            self._leave_lane()
            self._early = EarlyPart(self._parts)
            count = self.memory.arena.counts[position]
            count[:] = bytes(len(count))
            snapshots.complete_up_to(supervisor.agreed_snapshot)
            slot, copy_of_buffers = self.memory.newest_slot, self.memory.copy_of_buffers
            self._copy(slot, copy_of_buffers, position, len(here), into_slot=False)
            with suppress(StepBrokenError):  # then all begin again
                self._connect_lane()
                is_back = team.meet("putting back")

    def _plan_sum(self) -> None:
        team, division, arena = self._team, self.division, self.memory.arena
        numels = [parameter.numel() for parameter in self.parameters]
        how = cut if self.link is None else self.link.link.cut
        lanes, number = how(numels, self._num_lanes), self._lane_number
        bucket_bytes = _SLICE_BYTES * len(team.hosts)
        layouts = [lay_out_lane(arena.plan.parameters, pieces, bucket_bytes) for pieces in lanes]
        # All leave in one order, the last parameters first; here are the lanes that they are of.
        self._leaving = [at for at in reversed(range(len(lanes))) for _ in layouts[at]]
        self._ready = ReadyBuckets(
            arena.counts[: len(team.neighbours)],
            team.neighbours.index(team.world.rank),
            [bucket.indices for layout in reversed(layouts) for bucket in layout],
            len(numels),
        )
        self.pieces = [] if number is None else lanes[number]
        self.totals: Sequence[torch.Tensor] = []
        if self.link is not None:
            held = groups_on(division.groups, len(team.hosts))
            lane = None if self._lane is None else LaneTransfers(self._swap, team.host)
            self._sum = self._group_sum(self.link, self.pieces, held, lane)
            self.totals = self._sum.totals
        elif number is not None:
            held = [self._parts_on(ranks) for ranks in team.hosts]
            memory = LaneMemory(arena, held, team.host, division.parts)
            self._buckets = [
                HostBucket(bucket, at, memory) for at, bucket in enumerate(layouts[number])
            ]
            self._pipeline = BucketPipeline(self._buckets)
            region = Region(memory.totals, 0, arena.plan.parameters)
            self.totals = [region.piece(one.index, one.start, one.stop) for one in self.pieces]

    def _begin_turn(self) -> None:
        """Begin an exchange of all buckets, if none is under way."""
        if self._has_begun:
            return
        self._has_begun = True
        self._ready.begin()
        if self._lane is None:
            return
        self._num_turns += 1
        self._pipeline.begin()
        for bucket in self._buckets:
            bucket.expect(self._lane, self._num_turns)
        self._turn = LaneTurn(
            self._pipeline, self._lane, self._ready, self._num_ready, len(self._buckets)
        )

    def _num_ready(self) -> int:
        """Count the buckets of this worker's lane that can leave."""
        number = self._lane_number
        return self._leaving[: self._ready.count()].count(number) if number is not None else 0

    def _end_turn(self) -> None:
        """Wait until all buckets of this worker's lane have crossed."""
        self._has_begun = False
        turn, lane = self._turn, self._lane
        if turn is None or lane is None:
            return
        while turn.is_alive():
            turn.join(_LOOK_EVERY_S)
            if self._team.has_lost:
                lane.leave()
        self._turn = None
        if turn.error is not None:
            raise turn.error
        self._check(self._pipeline.failure)

    def _parts_on(self, ranks: Sequence[int]) -> list[Node]:
        """List the maximal sub-trees inside of a host's shards, which are neighbours."""
        held = [part for rank in ranks for part in self.division.parts_of[rank]]
        return parts_of(range(held[0].lo, held[-1].hi), self.division.num_shards)

    def _told(self) -> Iterator[bytes]:
        """Give the records and flags of this worker's shards, without the zeros behind them."""
        arena, division = self.memory.arena, self.division
        for kind, rows, numbers in (
            (_ROWS, arena.rows, list(division.shards)),
            (_FLAGS, arena.flags, [part.lo for part in division.mine]),
        ):
            for number in numbers:
                row = bytes(rows[number]).rstrip(b"\0")
                yield _ITEM.pack(kind, number, len(row)) + row

    def _hear(self, said: bytes) -> None:
        """Take records and flags of another host's shards; neighbours write the same."""
        arena, at = self.memory.arena, 0
        while at < len(said):
            kind, number, num_bytes = _ITEM.unpack_from(said, at)
            at += _ITEM.size
            row = (arena.rows if kind == _ROWS else arena.flags)[number]
            row[:] = said[at : at + num_bytes].ljust(len(row), b"\0")
            at += num_bytes

    def _send_buffers(self) -> None:
        """Bring the buffers that one host has kept for the next step to the others."""
        if self.buffers.slots and self._kept_on is not None:
            region = self.memory.arena.buffers[1 - self.buffers.now]
            num_bytes = region.everything().numel()
            kept = self.memory.arena.memory.view(region.start, num_bytes)
            self._send_from(self._kept_on, kept)

    def _send_from(self, host: int, here: memoryview) -> None:
        """Copy bytes from one host to the same place on all others."""
        others = set(range(len(self._team.hosts))) - {host}
        if self._team.host == host:
            self._swap({other: [here] for other in others}, {})
        else:
            self._swap({}, {host: [here]})

    def _swap(self, sent: Mapping[int, Views], into: Mapping[int, Views]) -> None:
        """Send bytes to other hosts of the lane, and get theirs."""
        lane = self._lane
        assert lane is not None
        self._num_turns += 1
        number = self._num_turns << 32
        lane.expect(number, into)
        swap = lane.swap(number, sent)
        try:
            while not lane.wait(swap, _LOOK_EVERY_S):
                if self._team.has_lost:
                    raise BrokenError("a worker was lost")
        except BrokenError as error:
            self._check(str(error))

    def _check(self, failure: str) -> None:
        """Raise an error that says who was lost, or else what has failed."""
        if not failure:
            return
        # Who has closed a connection may not yet be known to be lost.
        until_s = time.monotonic() + LOST_AFTER_S
        while not self._team.has_lost and time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
        if self._team.has_lost:
            self._team.meet("sums of a step")
        raise UnisonoError(
            f"hosts must be connected, but sums could not be sent between them ({failure}): see "
            f"to the link and start all again; with a `directory` the run goes on from its newest "
            f"checkpoint."
        )

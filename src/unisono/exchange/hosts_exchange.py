"""An exchange for workers of several hosts, each host with one copy of the parameters.

Inside a host all is as in ``shared.py``. Parameters are cut into lanes, one for each worker of the
smallest host. Worker i of every host adds up lane i, together with the others of lane i::

    host 0   sums of its shards ─┐            ┌─► slice 0 of all, added ─┐            ┌─► lane i
                                 │ all_to_all │       in tree order      │ all_gather │
    host 1   sums of its shards ─┘            └─► slice 1 of all, added ─┘            └─► lane i

Before, each host adds up its workers' parts as far as the tree allows: with 2ʲ shards on each host
one part of each crosses, which is what a ring all-reduce over the hosts would send.

What a shard has to say beside its gradients travels with the arrivals at the meeting of all. Nobody
is replaced: a worker, host or link that is lost ends the run on all workers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch

from unisono.errors import UnisonoError
from unisono.exchange.bucket_layout import lay_out_lane
from unisono.exchange.bucket_pipeline import BucketPipeline
from unisono.exchange.communicator import BrokenError, Communicator
from unisono.exchange.compressed_sums import CompressedSum
from unisono.exchange.connecting import stand_by
from unisono.exchange.gloo_communicator import GlooCommunicator
from unisono.exchange.host_parts import HostParts
from unisono.exchange.lane_transfers import LaneTransfers
from unisono.exchange.link_state import LinkState
from unisono.exchange.shared import SharedExchange
from unisono.plan.groups import groups_on
from unisono.plan.slices import cut
from unisono.plan.summation import Node, parts_of

_ROWS, _FLAGS = 0, 1
_ITEM = struct.Struct("<III")  # rows or flags, which shard's, how many bytes
_CHUNK_BYTES = 4 << 20


class HostsExchange(SharedExchange):
    """An exchange between hosts. Final; arguments as of :class:`Exchange`."""

    _communicator: Communicator | None = None
    _pipeline: BucketPipeline | None = None
    _kept_on: int | None = None

    @property
    def acts(self) -> bool:
        """See :class:`Exchange`; where one worker updates for all, one of each host does."""
        return self.have_all or self._team.leads_host

    @property
    def is_spread(self) -> bool:  # type: ignore[override]
        """See :class:`Exchange`."""
        return self.link is not None

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`Exchange`; afterwards this host knows what all shards have to say."""
        team = self._team
        is_kept_here = self.buffers.is_kept_here
        team.put_beside(bytes([is_kept_here]) + b"".join(self._told()))
        team.meet(purpose)
        self._kept_on = team.host if is_kept_here else None
        for rank, said in team.beside().items():
            self._hear(said[1:])
            if said[0]:
                self._kept_on = next(at for at, ranks in enumerate(team.hosts) if rank in ranks)
        return None

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`."""
        communicator = self._communicator
        if self.link is not None:
            present = self._sum.add()
            if communicator is not None and self._team.leads_host:
                self._send_buffers(communicator)
            return present
        self._host_parts.add_up()
        if communicator is not None and self._pipeline is not None:
            self._pipeline.begin()
            self._pipeline.finish(communicator)
            self._check(self._pipeline.failure)
            if self._team.leads_host:
                self._send_buffers(communicator)
        return self._host_parts.present

    def all_sums(self, purpose: str) -> bool:
        """See :class:`Exchange`."""
        everywhere = self.memory.arena.gradients[0]
        for piece, total in zip(self.pieces, self.totals, strict=True):
            everywhere.piece(piece.index, piece.start, piece.stop).copy_(total)
        return super().all_sums(purpose)

    def collect(self) -> None:
        """See :class:`Exchange`."""
        if not isinstance(self._sum, CompressedSum):
            return
        if self._communicator is not None:
            for host in range(len(self._team.hosts)):
                for tensor in self._sum.kept_by(host):
                    here = tensor.view(torch.uint8)
                    self._send_chunks_from(host, here, self._communicator)
        self._team.meet("state of a slow link")

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
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        super().unbind()

    @property
    def _lane(self) -> int | None:
        """Which lane is this worker's; None where its host has more workers than another."""
        own = self._team.neighbours.index(self._team.world.rank)
        return own if own < self._num_lanes else None

    @property
    def _num_lanes(self) -> int:
        return min(map(len, self._team.hosts))

    def _bring_to_hosts(self) -> None:
        """Connect the lanes, and bring the first host's state to the others."""
        team, lane = self._team, self._lane
        if lane is None:
            stand_by(team)
        else:
            try:
                self._communicator = GlooCommunicator(team, [ranks[lane] for ranks in team.hosts])
            except BrokenError as error:
                self._check(str(error))
        if self._communicator is not None and lane == 0:
            for start, stop in self.memory.arena.state_spans(0):
                here = self.memory.arena.memory.flat(start, stop - start, torch.uint8)
                self._send_chunks_from(0, here, self._communicator)
        team.meet("sharing parameters")

    def _plan_sum(self) -> None:
        team, division, arena = self._team, self.division, self.memory.arena
        lane, numels = self._lane, [parameter.numel() for parameter in self.parameters]
        how = cut if self.link is None else self.link.link.cut
        self.pieces = [] if lane is None else how(numels, self._num_lanes)[lane]
        if self.link is not None:
            self._plan_compressed(self.link)
            return
        held = [self._parts_on(ranks) for ranks in team.hosts]
        self._host_parts = HostParts(arena, held, team.host, division.parts, self.pieces)
        self.totals = []
        if lane is not None:
            layout = lay_out_lane(arena.plan.parameters, self.pieces, len(held))
            self._pipeline = BucketPipeline(
                layout, self._host_parts, held, team.host, division.num_shards, self.device
            )
            self.totals = [
                self._pipeline.totals[piece.index][piece.start : piece.stop]
                for piece in self.pieces
            ]

    def _plan_compressed(self, link: LinkState) -> None:
        """Be ready to add up groups, of which each host has some."""
        connected = self._communicator
        lane = None if connected is None else LaneTransfers(connected, self._check)
        held = groups_on(self.division.groups, len(self._team.hosts))
        self._sum = self._group_sum(link, self.pieces, held, lane)
        self.totals = self._sum.totals

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

    def _send_buffers(self, communicator: Communicator) -> None:
        """Bring the buffers that one host has kept for the next step to the others."""
        if self.buffers.slots and self._kept_on is not None:
            kept = self.memory.arena.buffers[1 - self.buffers.now].everything()
            self._send_from(self._kept_on, kept, communicator)

    def _send_chunks_from(self, host: int, here: torch.Tensor, communicator: Communicator) -> None:
        """Copy many bytes likewise."""
        for at in range(0, here.numel(), _CHUNK_BYTES):
            self._send_from(host, here[at : at + _CHUNK_BYTES], communicator)

    def _send_from(self, host: int, here: torch.Tensor, communicator: Communicator) -> None:
        """Copy bytes from one host to the same place on all others."""
        num_hosts, num_bytes = len(self._team.hosts), here.numel()
        nothing, none = here[:0], [0] * num_hosts
        if self._team.host == host:
            others = [0 if at == host else num_bytes for at in range(num_hosts)]
            sent = here.repeat(num_hosts - 1)
            transfer = communicator.all_to_all(nothing, sent, from_each=none, to_each=others)
        else:
            sender = [num_bytes if at == host else 0 for at in range(num_hosts)]
            transfer = communicator.all_to_all(here, nothing, from_each=sender, to_each=none)
        try:
            communicator.wait(transfer)
        except BrokenError as error:
            self._check(str(error))

    def _check(self, failure: str) -> None:
        """Raise an error that says who was lost, or else what has failed."""
        if not failure:
            return
        if self._team.has_lost:
            self._team.meet("sums of a step")
        raise UnisonoError(
            f"hosts must be connected, but sums could not be sent between them ({failure}): see "
            f"to the link and start all again; with a `directory` the run goes on from its newest "
            f"checkpoint."
        )

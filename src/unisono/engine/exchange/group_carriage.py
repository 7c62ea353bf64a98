"""Exchange parts through a process group; every worker adds up a slice of every bucket.

::

    worker 0   parts ─┐            ┌─► slice 0 of all parts, added ─┐            ┌─► all sums
                      │ all_to_all │       in tree order            │ all_gather │
    worker 1   parts ─┘            └─► slice 1 of all parts, added ─┘            └─► all sums

Parameters are sent in buckets (``bucket_pipeline.py``), each as soon as the last backward pass of a
worker has produced its gradients. The group uses gloo on CPUs and NCCL on GPUs.

A worker's parts stay in its memory until every worker has the sums. If the group breaks before
that, the survivors compute the lost shards, make another group and exchange again. The control
block, not the group, decides whether every worker has the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from typing_extensions import override

from unisono.engine.exchange.arena import Bytes, Region, private_bytes
from unisono.engine.exchange.between import Between
from unisono.engine.exchange.bucket_pipeline import (
    BucketPipeline,
    ParameterBucket,
    Rounds,
    lay_out_buckets,
)
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.communicator import BrokenError, Communicator
from unisono.engine.exchange.early_part import EarlyPart
from unisono.engine.exchange.gloo_communicator import GlooCommunicator
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.nccl_communicator import NcclCommunicator
from unisono.engine.exchange.parts import Gradients, OrderedSum, OwnParts, Parts, PublishedParts
from unisono.errors import UnisonoError
from unisono.plan.summation import Node
from unisono.runtime.device import Device
from unisono.runtime.workers.team import Team

_ATTEMPTS = 3
_PATIENCE_S = 0.2
_CHANGED = "gradients have changed after they were sent"
_BROKEN = 2
_VOTES = {"": 0, _CHANGED: 1}


@final
class GroupCarriage(Carriage):
    """Carries parts through a process group, and computes all sums on all workers.

    On several hosts the flags of parts are exchanged at the barrier, after slices are added up.
    Slices are added up with the flags of the step before, and sent again if those have changed.

    Args:
        connect: makes the communicator of the current members.
    """

    _communicator: Communicator | None = None
    _pipeline: BucketPipeline | None = None
    _sums: Sequence[BucketSum] = ()

    def __init__(
        self,
        layout: LoopLayout,
        between: Between,
        connect: Callable[[Team, Device], Communicator] | None = None,
    ) -> None:
        super().__init__(layout)
        self._between, self._connect = between, connect or _connect
        slots = self.arena.plan.parameters
        self._buckets = lay_out_buckets(slots, self.team.world.world_size)
        self._own = OwnParts(self._buckets.slots, self._buckets.num_bytes, layout.device)
        self._parts = Parts(self.arena.flags, self._own)
        self._early = EarlyPart(self._parts)

    @property
    @override
    def takes_early(self) -> bool:
        """Whether the group is connected; the first exchange of a membership connects it."""
        return self._connected() is not None

    @override
    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        self._early.put(part, index, gradient)
        pipeline, communicator = self._pipeline, self._connected()
        if pipeline is not None and communicator is not None:
            pipeline.mark_ready(index, communicator)

    @override
    def publish(self, part: Node, gradients: Gradients) -> None:
        changed = self._early.publish(part, gradients)
        if self._pipeline is not None:
            self._pipeline.progress.mark_changed(changed)

    @override
    def forget_step(self) -> None:
        self._early.forget()
        self._close()

    @override
    def gather(self, purpose: str) -> bool:
        """Wait until every worker has published its parts and this one has all sums."""
        pipeline, communicator = self._pipeline, self._connected()
        self.layout.copies.wait()  # of buffers, which the others read
        if pipeline is None:
            return self._between.gather(purpose)

        def meanwhile() -> None:
            if communicator is not None:
                # Late workers are waited for at the barrier, which reports who is late and why.
                pipeline.finish(communicator, _PATIENCE_S)

        if communicator is not None:
            pipeline.send_all(communicator)
        if self._between.gather(purpose, meanwhile) and self._settle(pipeline):
            return True
        self._close()
        return False

    @override
    def plan(self, *, everywhere: bool) -> None:
        layout, team = self.layout, self.team
        self.pieces = layout.whole_pieces
        if team.size == 1:
            self._pipeline = None
            self.totals = self._between.plan([self.pieces], self, None)
            self.whole = self._own[0].tensors()
            return
        self._between.plan([[] for _ in range(self._between.num_lanes)], self, None)
        held = [layout.division.parts_of[rank] for rank in team.membership.ranks]
        memory = private_bytes(self._buckets.num_bytes, layout.device)
        flags, position = self.arena.flags, team.position
        self._sums = [
            BucketSum(bucket, self._own, flags, held, position, memory, layout.device)
            for bucket in self._buckets.buckets
        ]
        self._pipeline = BucketPipeline(
            [one.transfer for one in self._sums], [one.indices for one in self._buckets.buckets]
        )
        sums = Region(memory, 0, self._buckets.slots)
        self.whole, self.totals = sums.tensors(), sums.pieces(self.pieces)

    @override
    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """Return which parameters have a gradient; the buckets contain the sums already."""
        return self._between.add_up(self)

    @override
    def published(self) -> PublishedParts:
        """Return all parts if this worker is alone, and only their flags otherwise."""
        if self.team.size > 1:
            return super().published()
        return self._parts.published(self.layout.division.parts)

    @override
    def await_readers(self, purpose: str) -> None:
        self.team.meet(purpose)

    @override
    def close(self) -> None:
        self._close()

    def _settle(self, pipeline: BucketPipeline) -> bool:
        """Check that all workers have all sums; return False if one was lost. Collective."""
        team, failures = self.team, {0: b""}
        membership = team.membership
        for _ in range(_ATTEMPTS):
            failure = self._move(pipeline)
            votes = team.vote(_VOTES.get(failure, _BROKEN), "sums of a step")
            if votes is None:
                return False
            pipeline.begin()
            if not any(votes.values()):
                return True
            failures = team.gather(failure.encode(), "failures of a step")
            if team.membership != membership:
                return False
            if _BROKEN in votes.values():
                self._close()
        rank, failure = next((rank, said.decode()) for rank, said in failures.items() if said)
        raise UnisonoError(
            f"the process group must carry gradients, but has failed {_ATTEMPTS} times "
            f"({failure} on rank {rank}): leave UNISONO_EXCHANGE out, or set it to staged."
        )

    def _move(self, pipeline: BucketPipeline) -> str:
        """Exchange all sums with the other workers; return why that failed, if it did."""
        try:
            communicator = self._connected()
            if communicator is None:
                self._close()
                communicator = self._connect(self.team, self.layout.device)
                self._communicator = communicator
        except BrokenError as error:
            return str(error)
        pipeline.finish(communicator)
        if pipeline.failure:
            self._close()  # at once: others may wait for this worker
            return pipeline.failure
        # Gradients may have changed after they were sent or added up.
        is_outdated = pipeline.progress.is_outdated or any(s.is_outdated() for s in self._sums)
        return _CHANGED if is_outdated else ""

    def _connected(self) -> Communicator | None:
        """Return the communicator, if it connects the present members."""
        communicator = self._communicator
        if communicator is None or communicator.membership != self.team.membership:
            return None
        return communicator

    def _close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


def _connect(team: Team, device: Device) -> Communicator:
    if device.is_host:
        return GlooCommunicator(team)
    return NcclCommunicator(team, device.torch)  # never run on a GPU


@final
class BucketSum:
    """The sum of one bucket, of which this worker adds up one slice and sends it to all.

    Args:
        own: this worker's parts.
        flags: per shard, which parameters have gradients in its part.
        held: the parts of each worker, by position.
        position: this worker's.
        all_sums: where to store the sums of all parameters, laid out like a part.
    """

    def __init__(
        self,
        bucket: ParameterBucket,
        own: OwnParts,
        flags: Sequence[memoryview],
        held: Sequence[Sequence[Node]],
        position: int,
        all_sums: Bytes,
        device: Device,
    ) -> None:
        self._bucket, self._own = bucket, own
        self._mine, self._size = held[position], len(held)
        self._length = length = bucket.slice_bytes(self._size)
        nodes = [node for nodes in held for node in nodes]
        memory = private_bytes(length * len(nodes), device)
        self._received = memory.flat(0, length * len(nodes), torch.uint8)
        self._from_each = [length * len(nodes) for nodes in held]
        # Addressed as if the whole bucket of each part were there; only its slice is.
        starts = [length * (at - position) for at in range(len(nodes))]
        regions = [Region(memory, start, bucket.slots) for start in starts]
        rows = [bucket.row(flags[node.lo]) for node in nodes]
        pieces = bucket.pieces(position, self._size)
        self._sum = OrderedSum(PublishedParts(nodes, rows, regions), pieces)
        self.is_outdated = self._sum.is_outdated
        at = length * [node.lo for node in nodes].index(0)
        self._total = self._received[at : at + length]
        self._all_sums = all_sums.flat(bucket.start, length * self._size, torch.uint8)

    def transfer(self, communicator: Communicator) -> Rounds:
        """Send slices to each, then sums to all."""
        yield communicator.all_to_all(
            self._received,
            self._by_slices(),
            from_each=self._from_each,
            to_each=[self._length * len(self._mine)] * self._size,
        )
        self._sum.add()
        return communicator.all_gather(self._all_sums, self._total)

    def _by_slices(self) -> torch.Tensor:
        """Return slice 0 of all own parts, then slice 1 of all own parts, and so on."""
        start, length, num_bytes = self._bucket.start, self._length, self._length * self._size
        flat = [self._own.memory(p.lo).flat(start, num_bytes, torch.uint8) for p in self._mine]
        if len(flat) == 1:
            return flat[0]
        starts = range(0, num_bytes, length)
        return torch.cat([part[first : first + length] for first in starts for part in flat])

"""Replicas whose parts travel through a process group; every worker adds up a slice of everything.

::

    worker 0   parts ─┐            ┌─► slice 0 of all parts, added ─┐            ┌─► all sums
                      │ all_to_all │       in tree order            │ all_gather │
    worker 1   parts ─┘            └─► slice 1 of all parts, added ─┘            └─► all sums

Parameters travel in buckets (``bucket_pipeline.py``), each as soon as the last backward pass of a
worker has left its gradients. On CPUs the group is gloo's, on GPUs NCCL's.

A worker's parts stay in its own memory until the sums are everybody's. If the group breaks before,
the survivors compute what the lost ones had, make another group and exchange again. Whether the
sums are everybody's is decided on the control block, not by the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.engine.exchange.arena import Bytes, Region, private_bytes
from unisono.engine.exchange.bucket_pipeline import (
    BucketPipeline,
    ParameterBucket,
    Rounds,
    lay_out_buckets,
)
from unisono.engine.exchange.communicator import BrokenError, Communicator
from unisono.engine.exchange.early_part import EarlyPart
from unisono.engine.exchange.gloo_communicator import GlooCommunicator
from unisono.engine.exchange.nccl_communicator import NcclCommunicator
from unisono.engine.exchange.parts import (
    Gradients,
    OrderedSum,
    OwnParts,
    Parts,
    PublishedParts,
)
from unisono.engine.exchange.replicas import ReplicaExchange
from unisono.engine.exchange.shared_optimizer_state import StateKeys
from unisono.errors import UnisonoError
from unisono.plan.summation import Node
from unisono.runtime.device import Device
from unisono.runtime.workers.launcher_messages import Live

_ATTEMPTS = 3
_PATIENCE_S = 0.2
_CHANGED = "gradients have changed after they were sent"
_BROKEN = 2
_VOTES = {"": 0, _CHANGED: 1}


class GroupExchange(ReplicaExchange):
    """An exchange of replicas; arguments as of :class:`~.protocol.Exchange`."""

    _early: EarlyPart
    _communicator: Communicator | None = None
    _pipeline: BucketPipeline | None = None
    _sums: Sequence[BucketSum]
    _present: tuple[bool, ...]

    @property
    def takes_early(self) -> bool:  # type: ignore[override]
        """See :class:`~.protocol.Exchange`; the first exchange of a membership connects it."""
        return self._connected() is not None

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """See :class:`~.protocol.Exchange`."""
        self._early.put(part, index, gradient)
        pipeline, communicator = self._pipeline, self._connected()
        if pipeline is not None and communicator is not None:
            pipeline.mark_ready(index, communicator)

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`~.protocol.Exchange`."""
        if not self._early.has_begun:
            super().publish(part, gradients)
            return
        changed = self._early.complete(part, gradients)
        if self._pipeline is not None:
            self._pipeline.progress.mark_changed(changed)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`~.protocol.Exchange`; all sums are here then, so none can be lost."""
        team, pipeline, communicator = self._team, self._pipeline, self._connected()
        self.copies.wait()  # of buffers, which the others read
        if pipeline is None:
            if not team.meet(purpose):
                return self._take_over()
            self._present = self._sum.add()
            return None
        if communicator is not None:
            pipeline.send_all(communicator)
        team.come(purpose)
        if communicator is not None:
            # Whoever is late is waited for at the meeting, where it is told who and why.
            pipeline.finish(communicator, _PATIENCE_S)
        return None if team.wait() and self._settle(pipeline) else self._take_over()

    def _settle(self, pipeline: BucketPipeline) -> bool:
        """See that buckets have come everywhere; False if somebody was lost. Collective."""
        team, failures = self._team, {0: b""}
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

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`~.protocol.Exchange`; :meth:`gather` has done so."""
        return self._present

    def unbind(self) -> None:
        """See :class:`~.protocol.Exchange`."""
        self._close()
        super().unbind()

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        arena = self.memory.arena
        self._layout = lay_out_buckets(arena.plan.parameters, self._team.world.world_size)
        self._own = OwnParts(self._layout.slots, self._layout.num_bytes, self.device)
        self._parts = Parts(arena.flags, self._own)
        self._early = EarlyPart(self._parts)
        super()._bind(keys, live)

    def _plan_sum(self) -> None:
        team, division = self._team, self.division
        if team.size == 1:
            self._pipeline = None
            self._sum = OrderedSum(self._parts.published(division.parts), self.pieces)
            sums = self._own[0]
            self.whole = sums.tensors()
            self.totals = [sums.piece(n, 0, p.numel()) for n, p in enumerate(self.parameters)]
            return
        held = [division.parts_of[rank] for rank in team.membership.ranks]
        memory = private_bytes(self._layout.num_bytes, self.device)
        self._sums = [
            BucketSum(
                bucket, self._own, self.memory.arena.flags, held, team.position, memory, self.device
            )
            for bucket in self._layout.buckets
        ]
        self._pipeline = BucketPipeline(
            [one.transfer for one in self._sums], [one.indices for one in self._layout.buckets]
        )
        sums = Region(memory, 0, self._layout.slots)
        self.whole, self.totals = sums.tensors(), sums.pieces(self.pieces)

    def _move(self, pipeline: BucketPipeline) -> str:
        """Bring all sums here, and this worker's to the others; say why that has failed, if so."""
        try:
            communicator = self._connected()
            if communicator is None:
                self._close()
                communicator = self._communicator = self._connect()
        except BrokenError as error:
            return str(error)
        pipeline.finish(communicator)
        if pipeline.failure:
            self._close()  # at once: others may wait for this worker
            return pipeline.failure
        self._present = tuple(there for one in reversed(self._sums) for there in one.present)
        return _CHANGED if self._is_outdated(pipeline) else ""

    def _is_outdated(self, pipeline: BucketPipeline) -> bool:
        """Return whether what was sent, or added up, is not what was published in the end."""
        return pipeline.progress.is_outdated

    def _connect(self) -> Communicator:
        if self.device.is_host:
            return GlooCommunicator(self._team)
        return NcclCommunicator(self._team, self.device.torch)  # never run on a GPU

    def _connected(self) -> Communicator | None:
        """Return the communicator, if it connects the present members."""
        communicator = self._communicator
        if communicator is None or communicator.membership != self._team.membership:
            return None
        return communicator

    def _take_over(self) -> list[Node]:
        self._close()
        more = self.division.take_over()
        self._plan_sum()
        return more

    def _close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


class BucketSum:
    """The sum of one bucket, of which this worker adds up a slice and gives it to all. Final.

    Args:
        own: this worker's parts.
        flags: per shard, which parameters its part has gradients for.
        held: the parts of each worker, by position.
        position: of this worker.
        all_sums: where the sums of all parameters go, laid out as a part.

    Attributes:
        present: for each parameter of the bucket, whether any shard had a gradient for it.
    """

    present: tuple[bool, ...] = ()

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
        # As if each part's bucket lay there as a whole: only its slice does.
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
        self.present = self._sum.add()
        return communicator.all_gather(self._all_sums, self._total)

    def _by_slices(self) -> torch.Tensor:
        """Return slice 0 of all own parts, then slice 1 of all parts, and so on, as bytes."""
        start, length, num_bytes = self._bucket.start, self._length, self._length * self._size
        flat = [self._own.memory(p.lo).flat(start, num_bytes, torch.uint8) for p in self._mine]
        if len(flat) == 1:
            return flat[0]
        starts = range(0, num_bytes, length)
        return torch.cat([part[first : first + length] for first in starts for part in flat])

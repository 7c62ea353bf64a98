"""Buckets on their way to everybody's sums, in a fixed order, beside a backward pass or behind it.

::

    ready      bucket 0   bucket 1   bucket 2        as gradients are, in whatever order
                  │          │          │
    sent          0 ──────── 1 ──────── 2            all_to_all, in this order on every worker
    summed           0 ──────── 1 ──────── 2         in tree order, as soon as the slices are here
    given to all        0 ──────── 1 ──────── 2      all_gather

Whatever fails here breaks the exchange of this step and no more: `finish` tells, and the parts are
still where they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from unisono.device import Device
from unisono.exchange.arena import Region
from unisono.exchange.block import Bytes, private_bytes
from unisono.exchange.bucket_layout import BucketLayout
from unisono.exchange.bucket_parts import ReceivedSlices, by_slices
from unisono.exchange.communicator import BrokenError, Communicator, Transfer
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import SentParts
from unisono.plan.summation import Node


class BucketSum:
    """The sum of one bucket, of which this worker adds up a slice. Final.

    Args:
        layout: the buckets.
        number: which one.
        own: this worker's parts.
        held: the parts of each worker, by position.
        position: of this worker.
        num_shards: S.
        all_sums: where the sums of all parameters go, laid out as a part.
        device: where this worker computes.

    Attributes:
        num_bytes: what it takes of the device's memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        number: int,
        own: SentParts,
        held: Sequence[Sequence[Node]],
        position: int,
        num_shards: int,
        all_sums: Bytes,
        device: Device,
    ) -> None:
        bucket = self._bucket = layout.buckets[number]
        self._own, self._mine, self._size = own, held[position], len(held)
        self._received = ReceivedSlices(bucket, held, position, own.flags, device)
        self._sum = OrderedSum(
            self._received,
            [part for parts in held for part in parts],
            num_shards,
            bucket.pieces(position, self._size),
        )
        self.num_bytes = len(self._received.everything)
        self._length = bucket.slice_bytes(self._size)
        self._sums = all_sums.flat(bucket.start, self._length * self._size, torch.uint8)

    def send(self, communicator: Communicator) -> Transfer:
        """Send all workers their slices of this worker's parts."""
        return communicator.all_to_all(
            self._received.everything,
            by_slices(self._own, self._bucket, self._mine, self._size),
            from_each=self._received.num_bytes,
            to_each=[self._length * len(self._mine)] * self._size,
        )

    def add_up(self) -> tuple[bool, ...]:
        """Add up the slices that have come, in tree order.

        Returns:
            For each parameter of the bucket, whether any shard had a gradient for it.
        """
        return self._sum.add()

    def give(self, communicator: Communicator) -> Transfer:
        """Give this worker's slice of the sums to all."""
        return communicator.all_gather(self._sums, self._received.part_of_first_shard)


class BucketPipeline:
    """Brings all buckets of a step to everybody's sums. Final.

    Args:
        layout: the buckets.
        own: this worker's parts.
        held: the parts of each worker, by position.
        position: of this worker.
        num_shards: S.
        device: where this worker computes.

    Attributes:
        whole: the sums of all parameters, as those lie.
        totals: the same as vectors.
        num_bytes: what it takes of the device's memory, beside the parts.
        failure: why the exchange of this step has failed so far; empty: it has not.
        is_outdated: whether something has changed since it was sent.
    """

    def __init__(
        self,
        layout: BucketLayout,
        own: SentParts,
        held: Sequence[Sequence[Node]],
        position: int,
        num_shards: int,
        device: Device,
    ) -> None:
        memory = private_bytes(layout.num_bytes, device)
        self._sums = [
            BucketSum(layout, number, own, held, position, num_shards, memory, device)
            for number in range(len(layout.buckets))
        ]
        self._layout = layout
        self.num_bytes = layout.num_bytes + sum(bucket.num_bytes for bucket in self._sums)
        region = Region(memory, 0, layout.slots)
        self.whole = region.tensors()
        self.totals = [region.piece(n, 0, slot.numel) for n, slot in enumerate(layout.slots)]
        self.begin()

    def begin(self) -> None:
        """Begin an exchange: nothing is under way."""
        self._missing = [len(bucket.indices) for bucket in self._layout.buckets]
        self._ready: set[int] = set()
        self._sent: list[Transfer] = []
        self._given: list[Transfer] = []
        self._present: list[tuple[bool, ...]] = []
        self.failure = ""
        self.is_outdated = False

    def mark_ready(self, index: int, communicator: Communicator) -> None:
        """Take note that all parts have a parameter's gradient, maybe another than before."""
        if index in self._ready:
            self.mark_changed([index])
            return
        self._ready.add(index)
        self._missing[self._layout.bucket_of[index]] -= 1
        self._advance(communicator)

    def mark_changed(self, indices: Sequence[int]) -> None:
        """Take note that parameters have other gradients than before."""
        num_sent = len(self._sent)
        self.is_outdated |= any(self._layout.bucket_of[index] < num_sent for index in indices)

    def send_all(self, communicator: Communicator) -> None:
        """Send what has not been sent yet: no more gradients will come."""
        self._missing = [0] * len(self._sums)
        self._advance(communicator)

    @property
    def present(self) -> tuple[bool, ...]:
        """For each parameter, whether any shard had a gradient for it; once all is finished."""
        return tuple(there for bucket in reversed(self._present) for there in bucket)

    def finish(self, communicator: Communicator, patience_s: float = math.inf) -> bool:
        """Wait until all sums are here, or for so many seconds.

        Returns:
            Whether it is over, well or with a :attr:`failure`.
        """
        self.send_all(communicator)
        until_s = time.monotonic() + patience_s

        def came(transfer: Transfer) -> bool:
            return communicator.wait(transfer, max(0.0, until_s - time.monotonic()))

        try:
            while not self.failure and len(self._given) < len(self._sums):
                if not came(self._sent[len(self._given)]):
                    return False
                self._advance(communicator)
            if not self.failure:
                if not all(map(came, self._given)):
                    return False
                for transfer in self._given:
                    transfer.join()
        except BrokenError as error:
            self.failure = str(error)
        return True

    def _advance(self, communicator: Communicator) -> None:
        """Do what can be done at once, each bucket in its turn."""
        try:
            while not self.failure and self._can_send():
                self._sent.append(self._sums[len(self._sent)].send(communicator))
            while not self.failure and self._can_add_up():
                turn = self._sums[len(self._given)]
                with communicator.aside():
                    self._sent[len(self._given)].join()
                    self._present.append(turn.add_up())
                    self._given.append(turn.give(communicator))
        except BrokenError as error:
            self.failure = str(error)

    def _can_send(self) -> bool:
        turn = len(self._sent)
        return turn < len(self._sums) and self._missing[turn] == 0

    def _can_add_up(self) -> bool:
        turn = len(self._given)
        return turn < len(self._sent) and self._sent[turn].is_ready

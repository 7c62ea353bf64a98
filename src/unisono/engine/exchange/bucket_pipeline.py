"""Exchange gradients in buckets, in a fixed order, during a backward pass or after it.

A bucket is exchanged in rounds: each worker sends data, computes with the data it receives, and
sends the result. Each bucket starts one round after the bucket before it. With two rounds::

    ready      bucket 0   bucket 1   bucket 2        as gradients arrive, in any order
                  │          │          │
    sent          0 ──────── 1 ──────── 2            in this order on every worker
    summed           0 ──────── 1 ──────── 2         as soon as the slices have arrived
    given to all        0 ──────── 1 ──────── 2      as soon as they are summed

A failure ends the exchange of this step only: it is recorded in `failure`, and the parts are kept.

Parameters are grouped from the last to the first, as a backward pass finishes them, so that
buckets are sent while other gradients are computed. Within a bucket each worker adds up one slice::

    a part    │ bucket 0: last parameters │ room │ bucket 1 │ room │ … │ first parameters │ room │
    bucket 0  │ slice 0 │ slice 1 │ slice 2 │      each of whole cache lines, the last one padded
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from unisono.engine.exchange.arena import Slot
from unisono.engine.exchange.communicator import BrokenError, Carrier, Transfer
from unisono.engine.exchange.parts import pieces_within
from unisono.plan.shards import Piece
from unisono.runtime.workers.memory import ALIGNMENT_BYTES, aligned

Rounds = Generator[Transfer, None, Transfer | None]
"""Transfers, each begun when the one before it is ready; returns one that nothing follows."""


class BucketProgress:
    """Tracks which buckets are ready, as gradients arrive in any order.

    Args:
        indices: the parameters of each bucket, in sending order; buckets may share parameters.

    Attributes:
        num_ready: how many buckets are ready, counted from the first without a gap.
        changed: buckets that have changed since they were ready.
        is_outdated: whether one of the first `num_ready` buckets has changed.
    """

    def __init__(self, indices: Sequence[Sequence[int]]) -> None:
        self._sizes = list(map(len, indices))
        self._buckets_of: defaultdict[int, list[int]] = defaultdict(list)
        for number, own in enumerate(indices):
            for index in own:
                self._buckets_of[index].append(number)
        self.begin()

    def begin(self) -> None:
        """Begin a step: nothing is ready."""
        self.missing = self._sizes.copy()
        self._seen: set[int] = set()
        self.changed: set[int] = set()
        self.num_ready, self.is_outdated = 0, False

    def mark(self, index: int) -> list[int]:
        """Record a parameter's gradient, new or changed; return the buckets that it completes."""
        if index in self._seen:
            self.mark_changed([index])
            return []
        self._seen.add(index)
        numbers = self._buckets_of[index]
        for number in numbers:
            self.missing[number] -= 1
        while self.num_ready < len(self.missing) and not self.missing[self.num_ready]:
            self.num_ready += 1
        return [number for number in numbers if not self.missing[number]]

    def mark_changed(self, indices: Sequence[int]) -> None:
        """Record that the gradients of parameters have changed."""
        numbers = {number for index in indices for number in self._buckets_of[index]}
        self.changed |= {number for number in numbers if not self.missing[number]}
        self.is_outdated |= any(number < self.num_ready for number in numbers)


@final
class BucketPipeline:
    """Exchanges all buckets of a step, so that every worker has all sums.

    Args:
        transfers: for each bucket, in sending order, a function that starts its rounds; all buckets
            have the same number of rounds on every worker.
        indices: the parameters of each bucket; empty if :meth:`mark_ready` is not used.

    Attributes:
        progress: which buckets are ready.
        failure: why the exchange of this step has failed; empty if it has not.
    """

    def __init__(
        self, transfers: Sequence[Callable[[Any], Rounds]], indices: Sequence[Sequence[int]] = ()
    ) -> None:
        self._transfers, self.progress = transfers, BucketProgress(indices)
        self.begin()

    def begin(self) -> None:
        """Start an exchange in which no bucket is under way."""
        self.progress.begin()
        self._under_way: list[_UnderWay] = []
        self.failure = ""

    def mark_ready(self, index: int, carrier: Carrier) -> None:
        """Record a parameter's gradient, new or changed, and send the buckets that are ready."""
        self.progress.mark(index)
        self.send(self.progress.num_ready, carrier)

    def send(self, num_ready: int, carrier: Carrier) -> None:
        """Send the first `num_ready` buckets, then start every round that can start."""
        try:
            while not self.failure and len(self._under_way) < num_ready:
                transfer = self._transfers[len(self._under_way)]
                self._under_way.append(_UnderWay(transfer(carrier)))
            self._advance(carrier)
        except BrokenError as error:
            self.failure = self.failure or str(error)

    def send_all(self, carrier: Carrier) -> None:
        """Send the remaining buckets; no more gradients will arrive."""
        self.send(len(self._transfers), carrier)

    def finish(self, carrier: Carrier, patience_s: float = math.inf) -> bool:
        """Wait until all buckets are exchanged or one fails; return False on a timeout."""
        self.send_all(carrier)
        until_s = time.monotonic() + patience_s
        try:
            while not self.failure and (bucket := self._first_open()) is not None:
                if not bucket.has_arrived(carrier, until_s):
                    return False
                self._advance(carrier)
            if not self.failure:
                if not all(bucket.has_arrived(carrier, until_s) for bucket in self._under_way):
                    return False
                for bucket in self._under_way:
                    bucket.join()
        except BrokenError as error:
            self.failure = str(error)
        return True

    def _advance(self, carrier: Carrier) -> None:
        """Start every round that can start now, in the order of the buckets."""
        before = math.inf
        for bucket in self._under_way:
            while bucket.num_begun < before and bucket.is_ready:
                with carrier.aside():
                    bucket.begin_next()
            before = bucket.num_begun

    def _first_open(self) -> _UnderWay | None:
        return next((one for one in self._under_way if one.num_begun < math.inf), None)


@final
class _UnderWay:
    """A bucket that is being exchanged."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.transfer: Transfer | None = next(rounds)  # of its newest round
        self.num_begun: float = 1  # rounds; infinite: all of them

    @property
    def is_ready(self) -> bool:
        return self.num_begun < math.inf and (self.transfer is None or self.transfer.is_ready)

    def begin_next(self) -> None:
        self.join()
        try:
            self.transfer = next(self._rounds)
            self.num_begun += 1
        except StopIteration as stop:
            self.transfer, self.num_begun = stop.value, math.inf

    def has_arrived(self, carrier: Carrier, until_s: float) -> bool:
        """Wait for the newest round's bytes until a time of ``time.monotonic``."""
        if self.transfer is None:
            return True
        return carrier.wait(self.transfer, max(0.0, until_s - time.monotonic()))

    def join(self) -> None:
        if self.transfer is not None:
            self.transfer.join()


FIRST_BYTES, BUCKET_BYTES = 1 << 20, 4 << 20


def bucket_ranges(
    sizes: Sequence[int], first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[range]:
    """Yield ranges of parameters, from the last to the first, of at least so many bytes each."""
    stop, num_bytes, full_bytes = len(sizes), 0, first_bytes
    for index in reversed(range(len(sizes))):
        num_bytes += sizes[index]
        if num_bytes >= full_bytes or index == 0:
            yield range(index, stop)
            stop, num_bytes, full_bytes = index, 0, bucket_bytes


@dataclass(frozen=True, slots=True)
class ParameterBucket:
    """Parameters that are sent together."""

    indices: range  # of the parameters
    start: int  # its first byte in a part
    num_bytes: int  # the bytes of the parameters, without room behind them
    slots: tuple[Slot, ...]  # where each parameter lies, from the bucket's start

    def slice_bytes(self, num_workers: int) -> int:
        """Return the size of each worker's slice."""
        return aligned(max(1, -(-self.num_bytes // num_workers)))

    def pieces(self, position: int, num_workers: int) -> list[Piece]:
        """Return the pieces in one worker's slice; the bucket's first parameter has index 0."""
        length = self.slice_bytes(num_workers)
        return list(pieces_within(self.slots, position * length, (position + 1) * length))

    def row(self, flags: memoryview) -> tuple[memoryview, memoryview]:
        """View the flags of the bucket's parameters in those of a part; see ``parts.presence``."""
        return flags[:1], flags[1 + self.indices.start : 1 + self.indices.stop]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The buckets of all parameters, in sending order."""

    buckets: tuple[ParameterBucket, ...]  # from the last parameters to the first
    slots: tuple[Slot, ...]  # where each parameter lies in a part, by index
    num_bytes: int  # of a part, with the room behind each bucket


def lay_out_buckets(
    slots: Sequence[Slot],
    world_size: int,
    first_bytes: int = FIRST_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> BucketLayout:
    """Group parameters into buckets that have room for the slices of `world_size` workers."""
    buckets: list[ParameterBucket] = []
    start = 0
    sizes = [slot.end - slot.offset for slot in slots]
    for indices in bucket_ranges(sizes, first_bytes, bucket_bytes):
        own, offset = [], 0
        for index in indices:
            own.append(replace(slots[index], offset=offset))
            offset = own[-1].end
        buckets.append(ParameterBucket(indices, start, offset, tuple(own)))
        start += offset + ALIGNMENT_BYTES * world_size  # the last slice may reach beyond
    in_order = [
        replace(slot, offset=bucket.start + slot.offset)
        for bucket in reversed(buckets)
        for slot in bucket.slots
    ]
    return BucketLayout(tuple(buckets), tuple(in_order), start)


def lay_out_lane(
    slots: Sequence[Slot], pieces: Sequence[Piece], bucket_bytes: int
) -> list[ParameterBucket]:
    """Group neighbouring pieces into buckets where the slots lie already, the last ones first.

    A bucket may begin and end within a parameter; each begins at a whole cache line.

    Args:
        pieces: what the buckets hold together, one after the other.
        bucket_bytes: what each bucket has, but for one; whole cache lines.
    """
    spans = [
        (slots[p.index].offset + p.start * size, slots[p.index].offset + p.stop * size)
        for p in pieces
        if p.start < p.stop and (size := slots[p.index].dtype.itemsize)
    ]
    start, stop = (spans[0][0], spans[-1][1]) if spans else (0, 0)
    buckets = []
    for at in range(start, stop, bucket_bytes):
        num_bytes = min(bucket_bytes, stop - at)
        held = [piece.index for piece in pieces_within(slots, at, at + num_bytes)]
        indices = range(held[0], held[-1] + 1) if held else range(0)
        own = tuple(replace(slots[index], offset=slots[index].offset - at) for index in indices)
        buckets.append(ParameterBucket(indices, at, num_bytes, own))
    return buckets[::-1]

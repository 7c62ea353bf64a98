"""Buckets on their way to everybody's sums, in a fixed order, beside a backward pass or behind it.

A bucket crosses in rounds: something is sent, and once all have sent it, what has come is computed
with, and more is sent. Each bucket begins a round after the one before it. With two rounds::

    ready      bucket 0   bucket 1   bucket 2        as gradients are, in whatever order
                  │          │          │
    sent          0 ──────── 1 ──────── 2            in this order on every worker
    summed           0 ──────── 1 ──────── 2         as soon as the slices are here
    given to all        0 ──────── 1 ──────── 2      likewise

Whatever fails here breaks the exchange of this step and no more: `finish` tells, and the parts are
still where they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from unisono.exchange.communicator import BrokenError, Transfer

Rounds = Generator[Transfer, None, Transfer | None]
"""Transfers, each begun when the one before it is ready; returns one that nothing follows."""


class Carrier(Protocol):
    """What transfers are waited for with; see :class:`~.communicator.Communicator`."""

    def wait(self, transfer: Transfer, patience_s: float = ..., /) -> bool:
        """Wait until the bytes of a transfer are there."""

    def aside(self) -> AbstractContextManager[Any]:
        """Have what is done inside of the block run beside what the worker computes."""


CarriedBy = TypeVar("CarriedBy", bound=Carrier)
CarriedBy_contra = TypeVar("CarriedBy_contra", bound=Carrier, contravariant=True)


class BucketCrossing(Protocol[CarriedBy_contra]):
    """A bucket that crosses once in each exchange."""

    def cross(self, carrier: CarriedBy_contra, /) -> Rounds:
        """Begin the rounds, one after the other: as many for every bucket, on every worker.

        Raises:
            BrokenError: nothing can be sent any more.
        """


class BucketPipeline(Generic[CarriedBy]):
    """Brings all buckets of a step to everybody's sums. Final.

    Args:
        crossings: the buckets, in the order in which they travel.
        bucket_of: the number of each parameter's bucket, by index; empty where nobody marks those.

    Attributes:
        failure: why the exchange of this step has failed so far; empty: it has not.
        is_outdated: whether something has changed since it was sent.
    """

    def __init__(
        self, crossings: Sequence[BucketCrossing[CarriedBy]], bucket_of: Sequence[int] = ()
    ) -> None:
        self._crossings, self._bucket_of = crossings, bucket_of
        self._sizes = [bucket_of.count(number) for number in range(len(crossings))]
        self.begin()

    def begin(self) -> None:
        """Begin an exchange: nothing is under way."""
        self._missing = self._sizes.copy()
        self._ready: set[int] = set()
        self._under_way: list[_UnderWay] = []
        self.failure = ""
        self.is_outdated = False

    def mark_ready(self, index: int, carrier: CarriedBy) -> None:
        """Take note that all parts have a parameter's gradient, maybe another than before."""
        if index in self._ready:
            self.mark_changed([index])
            return
        self._ready.add(index)
        self._missing[self._bucket_of[index]] -= 1
        turn = len(self._under_way)
        while turn < len(self._missing) and not self._missing[turn]:
            turn += 1
        self.send(turn, carrier)

    def mark_changed(self, indices: Sequence[int]) -> None:
        """Take note that parameters have other gradients than before."""
        num_sent = len(self._under_way)
        self.is_outdated |= any(self._bucket_of[index] < num_sent for index in indices)

    def send(self, num_ready: int, carrier: CarriedBy) -> None:
        """Send the first buckets, so many; then do what else can be done at once."""
        try:
            while not self.failure and len(self._under_way) < num_ready:
                crossing = self._crossings[len(self._under_way)]
                self._under_way.append(_UnderWay(crossing.cross(carrier)))
            self._advance(carrier)
        except BrokenError as error:
            self.failure = self.failure or str(error)

    def send_all(self, carrier: CarriedBy) -> None:
        """Send what has not been sent yet: no more gradients will come."""
        self.send(len(self._crossings), carrier)

    def finish(self, carrier: CarriedBy, patience_s: float = math.inf) -> bool:
        """Wait until all sums are here, or for so many seconds.

        Returns:
            Whether it is over, well or with a :attr:`failure`.
        """
        self.send_all(carrier)
        until_s = time.monotonic() + patience_s
        try:
            while not self.failure and (bucket := self._first_open()) is not None:
                if not bucket.has_come(carrier, until_s):
                    return False
                self._advance(carrier)
            if not self.failure:
                if not all(bucket.has_come(carrier, until_s) for bucket in self._under_way):
                    return False
                for bucket in self._under_way:
                    bucket.join()
        except BrokenError as error:
            self.failure = str(error)
        return True

    def _advance(self, carrier: CarriedBy) -> None:
        """Begin the rounds that can begin at once, each bucket in its turn."""
        before = math.inf
        for bucket in self._under_way:
            while bucket.num_begun < before and bucket.is_ready:
                with carrier.aside():
                    bucket.begin_next()
            before = bucket.num_begun

    def _first_open(self) -> _UnderWay | None:
        return next((one for one in self._under_way if one.num_begun < math.inf), None)


class _UnderWay:
    """A bucket that has begun to cross. Final.

    Attributes:
        transfer: that of its newest round.
        num_begun: how many rounds have begun; infinite: all of them.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.transfer: Transfer | None = next(rounds)
        self.num_begun: float = 1

    @property
    def is_ready(self) -> bool:
        """Whether another round can begin."""
        return self.num_begun < math.inf and (self.transfer is None or self.transfer.is_ready)

    def begin_next(self) -> None:
        self.join()
        try:
            self.transfer = next(self._rounds)
            self.num_begun += 1
        except StopIteration as stop:
            self.transfer, self.num_begun = stop.value, math.inf

    def has_come(self, carrier: Carrier, until_s: float) -> bool:
        """Wait for the newest round's bytes until a time of ``time.monotonic``."""
        if self.transfer is None:
            return True
        return carrier.wait(self.transfer, max(0.0, until_s - time.monotonic()))

    def join(self) -> None:
        if self.transfer is not None:
            self.transfer.join()

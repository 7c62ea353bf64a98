"""Messages from one rank to another: a send never waits for the receive.

The sender copies its tensor into a block of its heap and adds an entry to the ring towards the
receiver. The receiver fetches entries, matches them with its posted receives (same tag and source,
both in order), copies the data, and marks the block as read. The sender frees read blocks when it
sends again::

    sender   heap: │ read? │ contents … │     ring: │ tag, numel, offset, dtype │ …
    receiver arrived: entries without a receive     posted: receives without an entry

Only a full ring (1,024 entries) makes a sender wait. It then fetches its own messages, so ranks
that send to each other do not deadlock.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError
from unisono.runtime.c10d.calls import DTYPES, dtype_code
from unisono.runtime.c10d.group_memory import (
    DOORBELL,
    ENTRIES,
    ENTRY_BYTES,
    RING_ENTRIES,
    SENT,
    TAKEN,
    Blocks,
    GroupMemory,
)
from unisono.runtime.c10d.meeting import Meeting
from unisono.runtime.dtypes import dtype_name
from unisono.runtime.workers import meeting_point as futex
from unisono.runtime.workers.meeting_point import COUNTER, SLEEP_AT_MOST_S, WaitClock
from unisono.runtime.workers.shown_wait import ShownWait

_ENTRY = struct.Struct("<qqqq")
_READ_FLAG_BYTES = 64
_READ = b"\x01"


class MessageHeader(NamedTuple):
    """One message, as described by its ring entry."""

    tag: int
    numel: int
    offset: int
    dtype_code: int

    def __str__(self) -> str:
        return f"{self.numel:,} {dtype_name(DTYPES[self.dtype_code])} elements"


@dataclass(eq=False, slots=True)
class Receive:
    """A posted receive. A `source` of None receives from any rank."""

    tensor: torch.Tensor
    source: int | None
    tag: int
    arrived_from: int | None = None
    error: MismatchError | None = None

    @property
    def is_done(self) -> bool:
        """Whether a message has been matched."""
        return self.arrived_from is not None

    def __str__(self) -> str:
        return f"{self.tensor.numel():,} {dtype_name(self.tensor.dtype)} elements"


@final
class Messages:
    """One rank's sends and receives."""

    def __init__(self, region: GroupMemory, meeting: Meeting) -> None:
        self._region, self._meeting = region, meeting
        self._rank, self._names = rank, names = meeting.rank, meeting.names
        num_ranks = len(names)
        self._blocks = Blocks(region.mapping, region.layout.heap(rank))
        self._outgoing = [region.layout.ring(rank, other) for other in range(num_ranks)]
        self._incoming = [region.layout.ring(other, rank) for other in range(num_ranks)]
        self._doorbell = region.layout.line(rank) + DOORBELL
        self._unread: deque[int] = deque()
        self._arrived: list[deque[MessageHeader]] = [deque() for _ in range(num_ranks)]
        self._posted: list[Receive] = []
        self._lock = threading.RLock()

    def send(self, vector: torch.Tensor, destination: int, tag: int) -> None:
        """Store a copy of a contiguous vector for another rank; wait while the ring is full."""
        code = dtype_code(vector.dtype)
        with self._lock:
            self._take_back()
            offset = self._blocks.take(_READ_FLAG_BYTES + vector.numel() * vector.itemsize)
            self._region.memory.write(offset, b"\0")
            contents = offset + _READ_FLAG_BYTES
            self._region.memory.flat(contents, vector.numel(), vector.dtype).copy_(vector)
            self._unread.append(offset)
        entry = MessageHeader(tag, vector.numel(), offset, code)
        self._wait(
            lambda: self._put(entry, destination),
            self._outgoing[destination] + TAKEN,
            [destination],
            f"fetch one of {RING_ENTRIES:,} messages that rank {self._names[self._rank]} has sent",
            self._meeting.timeout_s,
        )

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Receive:
        """Post a receive; :meth:`wait` completes it."""
        dtype_code(tensor.dtype)
        receive = Receive(tensor, source, tag)
        with self._lock:
            self._posted.append(receive)
            self._progress()
        return receive

    def wait(self, receive: Receive, timeout_s: float | None = None) -> None:
        """Wait until the message has arrived; raise a MismatchError for a wrong size or dtype.

        A wait that ends otherwise withdraws the receive until it is waited for again, or the next
        one would get a later message. Only a wait with a limit of its own leaves it posted.
        """
        with self._lock:
            if not receive.is_done and receive not in self._posted:
                self._posted.append(receive)
        try:
            self._wait_for(receive, self._meeting.timeout_s if timeout_s is None else timeout_s)
        except BaseException:
            with self._lock:
                if timeout_s is None and receive in self._posted:
                    self._posted.remove(receive)
            raise
        if receive.error is not None:
            raise receive.error

    def _wait_for(self, receive: Receive, timeout_s: float) -> None:
        sources = [receive.source]
        if receive.source is None:
            sources = [other for other in range(len(self._incoming)) if other != self._rank]
        self._wait(
            lambda: self.is_done(receive),
            self._doorbell,
            [source for source in sources if source is not None],
            f"send {receive} with tag {receive.tag} to rank {self._names[self._rank]}",
            timeout_s,
        )

    def is_done(self, receive: Receive) -> bool:
        """Return whether the message has arrived, after fetching new messages."""
        if not receive.is_done:
            with self._lock:
                self._progress()
        return receive.is_done

    def _put(self, entry: MessageHeader, destination: int) -> bool:
        """Add an entry to a ring; return False if the ring is full."""
        ring = self._outgoing[destination]
        with self._lock:
            sent = self._region.word(ring + SENT)
            if (sent - self._region.word(ring + TAKEN)) % COUNTER >= RING_ENTRIES:
                self._progress()  # the reader may be waiting for this rank to fetch
                return False
            place = ring + ENTRIES + sent % RING_ENTRIES * ENTRY_BYTES
            self._region.memory.write(place, _ENTRY.pack(*entry))
            self._region.add_and_wake(ring + SENT)
            self._region.add_and_wake(self._region.layout.line(destination) + DOORBELL)
            return True

    def _progress(self) -> None:
        """Fetch new messages from the rings, and match them with receives in posting order."""
        for source, ring in enumerate(self._incoming):
            self._fetch(source, ring)
        if self._posted:
            self._posted = [receive for receive in self._posted if not self._match(receive)]

    def _fetch(self, source: int, ring: int) -> None:
        taken = self._region.word(ring + TAKEN)
        count = (self._region.word(ring + SENT) - taken) % COUNTER
        if not count:
            return
        self._region.add_and_wake(ring + SENT, 0)  # orders the reads below after the read of SENT
        for number in range(taken, taken + count):
            place = ring + ENTRIES + number % RING_ENTRIES * ENTRY_BYTES
            data = self._region.memory.read(place, ENTRY_BYTES)
            self._arrived[source].append(MessageHeader(*_ENTRY.unpack(data)))
        self._region.add_and_wake(ring + TAKEN, count)

    def _match(self, receive: Receive) -> bool:
        everybody = range(len(self._arrived))
        for source in everybody if receive.source is None else (receive.source,):
            for entry in self._arrived[source]:
                if entry.tag == receive.tag:
                    self._arrived[source].remove(entry)
                    self._deliver(entry, receive, source)
                    return True
        return False

    def _deliver(self, entry: MessageHeader, receive: Receive, source: int) -> None:
        tensor = receive.tensor
        if (entry.numel, DTYPES[entry.dtype_code]) == (tensor.numel(), tensor.dtype):
            contents = entry.offset + _READ_FLAG_BYTES
            vector = self._region.memory.flat(contents, entry.numel, tensor.dtype)
            with torch.inference_mode():  # the tensor may be an inference tensor or not
                tensor.copy_(vector.view(tensor.shape))
        else:
            receive.error = MismatchError(
                f"a message and its receive must agree, but rank {self._names[source]} has sent "
                f"{entry} with tag {entry.tag} and rank {self._names[self._rank]} receives "
                f"{receive}: give both the same size and dtype."
            )
        self._region.memory.write(entry.offset, _READ)
        receive.arrived_from = source

    def _take_back(self) -> None:
        """Free the blocks of this rank's messages that have been read."""
        for _ in range(len(self._unread)):
            offset = self._unread.popleft()
            if self._region.memory.read(offset, 1) == _READ:
                self._blocks.give_back(offset)
            else:
                self._unread.append(offset)

    def _wait(
        self, is_done: Callable[[], bool], word: int, others: list[int], what: str, timeout_s: float
    ) -> None:
        """Try again whenever a word changes, as long as one of the others may change it."""
        clock = WaitClock()
        with closing(ShownWait()) as shown:
            while True:
                seen = self._region.word(word)
                if is_done():
                    return
                waited_s = clock.look()
                if waited_s < self._meeting.spin_s:
                    os.sched_yield()
                    continue
                lost = self._meeting.find_departed(others)
                if lost and len(lost) == len(others) and not is_done():
                    name, why = self._names[lost[0][0]], self._meeting.why(*lost[0])
                    raise PeerLostError(
                        f"rank {name} must {what}, but never will, since {why}.", rank=name
                    )
                if waited_s >= timeout_s:
                    raise WaitTimeoutError(
                        f"{self._named(others)} must {what}, but did not in {waited_s:.1f} s: look "
                        f"at what it does there.",
                        missing=tuple(self._names[other] for other in others),
                        waited_s=waited_s,
                    )
                shown.report_if_due(
                    waited_s, lambda: f"a call that waits for {self._named(others)} to {what}"
                )
                at_most_s = min(SLEEP_AT_MOST_S, timeout_s - waited_s)
                futex.wait(self._region.address + word, seen, at_most_s)

    def _named(self, others: list[int]) -> str:
        names = ", ".join(str(self._names[other]) for other in others)
        return f"rank {names}" if len(others) == 1 else f"one of ranks {names}"

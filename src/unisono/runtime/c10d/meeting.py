"""Where the ranks of a group synchronize for a call: they compare calls and exchange bytes.

A call has one or more barriers (see ``meeting_point``). Before the first one each rank posts its
call, in one of two alternating places; after it, all ranks compare the posts. A rank writes to its
own slot, waits at a barrier, and then reads the others' slots. Slots alternate too, so a rank can
write its next data while others still read the last, and n chunks take n barriers:

    rank 0   write A₀ │ meet │ read B₀, write A₁ │ meet │ read B₁ …
    rank 1   write B₀ │ meet │ read A₀, write B₁ │ meet │ read A₁ …
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import final

import torch

from unisono.errors import MismatchError, PeerLostError
from unisono.runtime.c10d.calls import encode
from unisono.runtime.c10d.group_memory import (
    CALLS,
    DOORBELL,
    POST_TEXT_BYTES,
    REASON,
    REASON_BYTES,
    SLOT_BYTES,
    GroupMemory,
)
from unisono.runtime.procfs import started_at
from unisono.runtime.workers import meeting_point as futex
from unisono.runtime.workers.context import context
from unisono.runtime.workers.meeting_point import COUNTER, Departure, MeetingPoint, add_and_wake
from unisono.runtime.workers.shown_wait import ShownWait

# A death explains more than a rank that has left, and that more than one that has given up.
_TELLING = (Departure.DIED, Departure.FINISHED, Departure.FAILED)


@final
class Meeting(MeetingPoint):
    """One rank's view of the meeting point."""

    def __init__(
        self, region: GroupMemory, rank: int, names: Sequence[int], timeout_s: float
    ) -> None:
        is_told = context().supervisor.explains_waits  # the launcher reports long waits
        super().__init__(region.seats, rank, names, math.inf if is_told else None)
        region.seats[rank].register(os.getpid(), started_at(os.getpid()) or 0)
        self._region, self.num_ranks = region, len(names)
        self._lines = [region.layout.line(rank) for rank in range(self.num_ranks)]
        self.timeout_s = self._timeout_s = timeout_s
        self._shown = ShownWait()
        self.num_met = self._num_calls = 0
        self._post = b""
        self._is_compared = True
        self.is_ahead = False  # whether this rank has arrived without having waited
        self._ended = ""
        self._ending = threading.RLock()  # a signal handler may re-enter

    def announce(self, call: bytes, timeout_s: float | None = None) -> None:
        """Post the call that the next barrier begins; this rank must not be ahead."""
        self._check_usable()
        self._num_calls += 1
        self._post = call + b"\0"
        start = self._region.layout.post(self.rank, self._num_calls)
        self._region.mapping[start : start + len(self._post)] = self._post
        self._region.words[(self._lines[self.rank] + CALLS) // 4] = self._num_calls % COUNTER
        self._is_compared = False
        self._timeout_s = self.timeout_s if timeout_s is None else timeout_s

    def arrive(self) -> None:
        """Arrive without waiting: the others may now read what this rank has written."""
        self.num_met = (self.num_met + 1) % COUNTER
        add_and_wake(self._mine)
        self.is_ahead = True

    def wait(self, patience_s: float = math.inf, *, spins: bool = True) -> bool:
        """Wait until all ranks have arrived, and compare calls. Return False after `patience_s`.

        It may then be called again. All ranks raise a MismatchError.
        """
        try:
            if not self.await_others(self.num_met, self._timeout_s, patience_s, spins=spins):
                return False
        finally:
            self._shown.close()
        self.is_ahead = False
        if not self._is_compared:
            self._is_compared = True
            self._compare()
        return True

    def refuse(self) -> None:
        """Arrive, without waiting, only to report that this rank's arguments are wrong."""
        with suppress(PeerLostError):  # else no rank waits
            self.announce(encode("a call with wrong arguments"))
            self._is_compared = True
            self.arrive()

    def give_up(self, reason: str) -> None:
        """End the group because this rank has failed, and publish the reason."""
        self._end(Departure.FAILED, reason, f"a call failed half-way: {reason}")

    def leave(self) -> None:
        """End the group for this rank, as `destroy_process_group` does."""
        self._end(Departure.FINISHED, "", "it was destroyed.")

    def _end(self, how: Departure, reason: str, ended: str) -> None:
        with self._ending:  # the first to end it sets the reason
            if self._ended:
                return
            self._ended = ended
            text = reason.encode()[: REASON_BYTES - 1].ljust(REASON_BYTES, b"\0")
            self._region.memory.write(self._lines[self.rank] + REASON, text)
            self._seats[self.rank].leave(how)
            for line in self._lines:
                futex.wake(self._region.address + line + DOORBELL)

    def _check_usable(self) -> None:
        if self._ended:
            raise PeerLostError(
                f"a process group must not be used after its end, but this one has ended, as "
                f"{self._ended.rstrip('.')}. Make a new one.",
                rank=self.names[self.rank],
            )

    def find_departed(self, missing: Sequence[int]) -> list[tuple[int, Departure]]:
        """Return the ranks that have left; the process of a killed rank is checked."""
        self._check_usable()  # another thread may have aborted the group
        seats = [(rank, self._seats[rank]) for rank in missing]
        found = [
            (rank, Departure.DIED if seat.has_died else Departure(seat.departure))
            for rank, seat in seats
        ]
        gone = [one for one in found if one[1] != Departure.PRESENT]
        return sorted(gone, key=lambda one: _TELLING.index(one[1]))

    def why(self, rank: int, how: Departure) -> str:
        """Describe why a rank will never arrive."""
        if how == Departure.DIED:
            return f"its process {self._seats[rank].pid} has ended"
        if how == Departure.FINISHED:
            return "it has destroyed the process group"
        text = self._region.memory.read(self._lines[rank] + REASON, REASON_BYTES).rstrip(b"\0")
        return f'it has given up, saying "{text.decode(errors="replace")}"'

    def lose(self, rank: int, how: Departure) -> None:
        """Raise an error that names the lost rank."""
        name = self.names[rank]
        raise PeerLostError(
            f"every rank must come to {self.here()}, but rank {name} never will, since "
            f"{self.why(rank, how)} ({self.last_seen(rank)}).",
            rank=name,
        )

    def show(self, waited_s: float) -> None:
        """Report a long wait to the launcher."""
        self._shown.report_if_due(waited_s, self.here)

    def here(self) -> str:
        """Describe this rank's current call."""
        return f"{self._call_of(self.rank, self._num_calls)} (call {self._num_calls})"

    def last_seen(self, rank: int) -> str:
        """Describe the last call of a rank."""
        number = self._region.word(self._lines[rank] + CALLS)
        if not number:
            return "never seen"
        return f"last seen in {self._call_of(rank, number)}, call {number}"

    def _compare(self) -> None:
        """Raise if another rank's post of this call differs from this rank's."""
        post, mapping = self._post, self._region.mapping
        for other in self._others:
            start = self._region.layout.post(other, self._num_calls)
            if mapping[start : start + len(post)] != post:
                raise self._mismatch(other)

    def _call_of(self, rank: int, num_calls: int) -> str:
        start = self._region.layout.post(rank, num_calls)
        text = self._region.memory.read(start, POST_TEXT_BYTES)
        return text.partition(b"\0")[0].decode(errors="replace")

    def _mismatch(self, other: int) -> MismatchError:
        rank, number, names = self.rank, self._num_calls, self.names
        return MismatchError(
            f"every rank must make the same calls in the same order, but in call {number} rank "
            f"{names[rank]} came to {self._call_of(rank, number)} and rank {names[other]} to "
            f"{self._call_of(other, number)}: look for code that not every rank runs, or for "
            f"tensors whose dtype or size differs."
        )


_VIEWS_AT_MOST = 512

Meetings = Generator[None, None, None]
"""The steps of a collective: it yields wherever all ranks must arrive before it continues."""


@final
class Board:
    """One rank's view of all ranks' slots."""

    def __init__(self, region: GroupMemory, meeting: Meeting) -> None:
        self.meeting = meeting
        self.rank = meeting.rank
        self.num_ranks = meeting.num_ranks
        # Making views takes longer than a short reduction.
        self._slots = functools.lru_cache(_VIEWS_AT_MOST)(functools.partial(_slots_of, region))

    def mine(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a view of this rank's slot for the next barrier."""
        return self._slots(dtype, numel)[(self.meeting.num_met + 1) % 2][self.rank]

    def chunks(self, numel: int, dtype: torch.dtype, parts: int = 1) -> Iterator[tuple[int, int]]:
        """Split a vector, even an empty one, so that `parts` chunks fit side by side in a slot."""
        each = max(SLOT_BYTES // (parts * dtype.itemsize), 1)
        if numel <= each:
            return iter(((0, numel),))
        return ((start, min(start + each, numel)) for start in range(0, numel, each))

    def shown(self, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """Return views of what each rank has written for the last barrier."""
        return self._slots(dtype, numel)[self.meeting.num_met % 2]

    def close(self) -> None:
        """Drop all views, so that the memory can be freed."""
        self._slots.cache_clear()


def _slots_of(
    region: GroupMemory, dtype: torch.dtype, numel: int
) -> tuple[list[torch.Tensor], ...]:
    """Return views of the slots for even and for odd barriers, one per rank."""
    slot, ranks = region.layout.slot, range(region.layout.world_size)
    return tuple(
        [region.memory.flat(slot(rank, parity), numel, dtype) for rank in ranks]
        for parity in (0, 1)
    )

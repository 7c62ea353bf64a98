"""The control block that launcher and workers share: each worker's progress and departure.

One memfd: a head, and a line with a mailbox for each rank. Only its rank writes a line (only the
launcher writes `departure` and the head), so no locks are needed. Without our launcher rank 0
creates the block (`external.py`), and the first worker to notice a death writes the `departure`.

Purposes and votes belong to the last two arrivals: no worker can be two barriers ahead. A plan says
what all workers do before a certain step. The leader writes it between the two barriers of the step
before, so all workers that pass the second barrier read the same plan.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import final

from unisono.errors import MismatchError, PeerLostError
from unisono.runtime.procfs import create_memory, started_at
from unisono.runtime.timeouts import MEETING
from unisono.runtime.workers.meeting_point import (
    Departure,
    MeetingPoint,
    MeetingSeat,
    add_and_wake,
    spin_s,
)

MAILBOX_BYTES = 64 * 1024
NUM_TIMES = 7
PURPOSE_BYTES, WAIT_BYTES, CALL_BYTES = 24, 124, 124
MEMORY_NAME = "unisono-control"


class Head(ctypes.Structure):
    """What the launcher tells all workers."""

    _fields_ = (
        # Whether all should stop between two steps; the signal, where workers receive signals.
        ("wish", ctypes.c_uint32),
        ("end", ctypes.c_uint32),  # the signal that ends the job after the current step, or 0
        ("is_over", ctypes.c_uint32),  # the launcher is ending the workers
        ("starts_again", ctypes.c_uint32),  # whether workers replace those of an earlier start
        ("rest_of_line", ctypes.c_uint8 * 48),
    )


class _Times(ctypes.Structure):
    _fields_ = (("step", ctypes.c_int64), ("seconds", ctypes.c_double * NUM_TIMES))


class RankLine(MeetingSeat):
    """What one rank publishes about itself, in whole cache lines."""

    _fields_ = (
        ("begun", ctypes.c_int64),  # the current step plus 1; 0 before the first step
        ("purposes", ctypes.c_char * PURPOSE_BYTES * 2),  # of the last two arrivals, as votes are
        ("plan_step", ctypes.c_int64),
        ("plan", ctypes.c_uint32),
        ("wish", ctypes.c_uint32),  # of its host's launcher, for workers of other hosts
        ("memory", ctypes.c_int64),  # in use on its device, in bytes
        ("unused", ctypes.c_int64 * 2),
        ("votes", ctypes.c_uint32 * 2),
        ("times", _Times * 2),
        ("num_waits", ctypes.c_uint32),
        ("wait", ctypes.c_char * WAIT_BYTES),
        ("num_calls", ctypes.c_uint32),
        ("call", ctypes.c_char * CALL_BYTES),
        ("mail_bytes", ctypes.c_int64),
        ("mail", ctypes.c_uint8 * MAILBOX_BYTES),
        ("rest_of_line", ctypes.c_int64 * 7),
    )

    @property
    def step(self) -> int:
        """The step that the worker was last seen in; 0 before the first."""
        return int(self.begun) - 1 if self.begun else 0

    @functools.cached_property
    def times_bytes(self) -> list[memoryview]:
        """Where the worker spent its last two steps, alternating, as bytes."""
        return [memoryview(times).cast("B") for times in self.times]


_HEAD_BYTES, _LINE_BYTES = ctypes.sizeof(Head), ctypes.sizeof(RankLine)
_STEP, _TOLD = struct.Struct("q"), struct.Struct(f"q{NUM_TIMES}d")  # as _Times


class ControlBlock:
    """The mapped control block; `fd` is negative if the block is not shared."""

    can_spin = True

    def __init__(self, fd: int, world_size: int) -> None:
        self.fd = fd
        self.world_size = world_size
        self.has_lost = False  # a worker here for which nobody comes: its loops end by an error
        self._map = mmap.mmap(fd, control_block_bytes(world_size))
        self.head = Head.from_buffer(self._map)
        self.lines = [
            RankLine.from_buffer(self._map, _HEAD_BYTES + rank * _LINE_BYTES)
            for rank in range(world_size)
        ]

    @classmethod
    def create(cls, world_size: int) -> ControlBlock:
        """Create a control block for `world_size` workers; called by a launcher or by rank 0."""
        return cls(create_memory(MEMORY_NAME, control_block_bytes(world_size)), world_size)

    @property
    def wish(self) -> int:
        """Whether all workers should stop between two steps; see :class:`Head`."""
        return int(self.head.wish)

    def departure(self, rank: int) -> Departure:
        """Return whether `rank` has left."""
        return Departure(self.lines[rank].departure)

    def leave(self, rank: int, how: Departure) -> None:
        """Mark that `rank` will never arrive again, and wake the workers that wait for it."""
        self.lines[rank].leave(how)

    def mark_replaced(self, rank: int, arrivals: int) -> None:
        """Mark that a new worker has taken the seat of `rank`, before any worker waits for it."""
        self.lines[rank].arrivals = arrivals
        self.lines[rank].departure = int(Departure.PRESENT)

    def clear(self, rank: int) -> None:
        """Clear the line of `rank`, whose process is gone, for one that starts again."""
        ctypes.memset(ctypes.addressof(self.lines[rank]), 0, _LINE_BYTES)

    def take_seat(self, rank: int) -> None:
        """Record this process as the worker of `rank`."""
        self.lines[rank].register(os.getpid(), started_at(os.getpid()) or 0)

    def set_times(self, rank: int, step: int, times: Sequence[float]) -> None:
        """Store where `rank` spent a step, in seconds; overwritten two steps later."""
        told = self.lines[rank].times_bytes[step % 2]
        _TOLD.pack_into(told, 0, -1, *times)
        _STEP.pack_into(told, 0, step)

    def times(self, rank: int, step: int) -> tuple[float, ...] | None:
        """Return where `rank` spent a step; None if it has not been stored, or was overwritten."""
        view = self.lines[rank].times_bytes[step % 2]
        told = _TOLD.unpack_from(view)
        return told[1:] if told[0] == step == _STEP.unpack_from(view)[0] else None

    def step_under_way(self, rank: int) -> int | None:
        """Return the step that `rank` is in; None if that step has ended or none has begun."""
        begun = self.lines[rank].begun
        told = self.times(rank, begun - 1) if begun else None
        # Memory that was never written looks like step 0, but no step begins at 0 s.
        is_over = not begun or (told is not None and told[0] > 0)
        return None if is_over else int(begun) - 1

    def show_wait(self, rank: int, what: bytes) -> None:
        """Store what `rank` waits for outside of a barrier; empty when the wait is over."""
        line = self.lines[rank]
        line.wait = what[:WAIT_BYTES] or line.wait
        line.num_waits = (line.num_waits | 1) + (not what)  # odd while it waits

    def wait_of(self, rank: int) -> tuple[int, bytes | None]:
        """Return how many such waits of `rank` have begun or ended, and the current one or None."""
        count = self.lines[rank].num_waits
        return count, self.lines[rank].wait if count % 2 else None

    def note_call(self, rank: int, call: bytes) -> None:
        """Store the collective of torch.distributed that `rank` begins."""
        line = self.lines[rank]
        line.call = call[:CALL_BYTES]
        line.num_calls += 1

    def call_of(self, rank: int) -> tuple[int, bytes]:
        """Return how many collectives `rank` has recorded, and the newest."""
        line = self.lines[rank]
        return line.num_calls, line.call

    def post(self, rank: int, message: bytes) -> None:
        """Store at most :data:`MAILBOX_BYTES` bytes in the mailbox of `rank`."""
        line = self.lines[rank]
        line.mail_bytes = len(message)
        memoryview(line.mail).cast("B")[: len(message)] = message

    def posted(self, rank: int) -> bytes:
        """Read the mailbox of `rank`."""
        line = self.lines[rank]
        return bytes(memoryview(line.mail).cast("B")[: line.mail_bytes])

    def attach(self, which: int, data: bytes) -> None:
        """Send bytes to the workers of other hosts with this worker's next arrival."""
        return

    def attached(self, which: int) -> dict[int, bytes]:
        """Return and remove what workers of other hosts sent with an arrival, by rank."""
        return {}

    def send_line(self) -> None:
        """Send this worker's line to all other hosts."""
        return

    def is_far(self, rank: int) -> bool:
        """Return whether a worker is on another host."""
        return False

    def receive(self, timeout_s: float = 0.0) -> None:
        """Receive from workers of other hosts, waiting up to `timeout_s` for the first message."""
        return

    def close(self) -> None:
        """Close the control block's file descriptor; the mapping lives as long as the object."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def control_block_bytes(world_size: int) -> int:
    """Return the size of a control block for `world_size` workers."""
    return _HEAD_BYTES + world_size * _LINE_BYTES


_SAME_CALLS = "all workers must make the same calls in the same order."
_START_AGAIN = (
    "find out what ended it (a signal, too little memory), or its host, and start all workers "
    "again; with a `directory` the run continues from its newest checkpoint."
)


@final
class Barrier(MeetingPoint):
    """One worker's view of the barrier; `look_around` marks dead workers if no launcher does."""

    def __init__(
        self,
        control: ControlBlock,
        rank: int,
        *,
        notice_after_s: float | None = None,
        look_around: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(control.lines, rank, range(control.world_size), notice_after_s)
        self.can_spin = control.can_spin
        self._control, self._line = control, control.lines[rank]
        self._timeout_s, self._look_around = MEETING.in_s(), look_around

    def set_membership(self, ranks: Sequence[int]) -> None:
        """Wait only for these ranks from now on."""
        self._others = [other for other in ranks if other != self.rank]
        self.spin_s = spin_s(len(ranks))

    def departure(self, other: int) -> Departure:
        """Return how `other` has left, after checking for workers that died silently."""
        self._look_around()
        return self._control.departure(other)

    @property
    def arrivals(self) -> int:
        """The number of barriers that this worker has reached, modulo 2³²."""
        return int(self._line.arrivals)

    def arrive(self, purpose: str = "") -> None:
        """Arrive at the next barrier. Collective: every rank calls it, in the same order."""
        self._line.purposes[(self.arrivals + 1) % 2].value = purpose.encode()[:PURPOSE_BYTES]
        add_and_wake(self._mine)
        self._control.send_line()

    def vote(self, vote: int) -> None:
        """Publish a number below 2³² with this worker's next arrival."""
        self._line.votes[(self.arrivals + 1) % 2] = vote

    def votes(self, ranks: Sequence[int]) -> dict[int, int]:
        """Return the votes that came with the arrivals that :meth:`wait` waited for, by rank."""
        which = self.arrivals % 2
        return {rank: self._control.lines[rank].votes[which] for rank in ranks}

    def wait(self) -> bool:
        """Wait until the others arrive. Return False if a worker was lost before it arrived.

        Whether a lost worker had arrived never changes, so all others stop at the same barrier.
        """
        target = self.arrivals
        if not self.await_others(target, self._timeout_s):
            return False
        mine = self._line.purposes[target % 2].value
        for other in self._others:
            theirs = self._control.lines[other].purposes[target % 2].value
            if theirs != mine:
                raise MismatchError(
                    f"every worker must make the same calls in the same order, but rank "
                    f"{self.rank} came to `{mine.decode().strip()}` and rank {other} to "
                    f"`{theirs.decode().strip()}`: call it, and change the model between steps, on "
                    f"every worker, not under `if rank == 0` nor where one caught an exception."
                )
        return True

    def find_departed(self, missing: Sequence[int]) -> list[tuple[int, Departure]]:
        """Return the missing workers that have left, after checking for silent deaths."""
        self._look_around()
        left = [(rank, self._control.departure(rank)) for rank in missing]
        return [one for one in left if one[1] != Departure.PRESENT]

    def lose(self, rank: int, how: Departure) -> None:
        """Raise unless the lost worker will be replaced."""
        if not how.may_be_back:
            self._control.has_lost = True
            raise self._left(rank, how)

    def here(self) -> str:
        """Return the step that this worker is in."""
        return f"step {self._line.step}"

    def last_seen(self, rank: int) -> str:
        """Return the step that a worker was last seen in."""
        return f"last seen in step {self._control.lines[rank].step}"

    def rest(self, rank: int, seen: int, at_most_s: float) -> None:
        """Sleep until a worker may have arrived; messages from other hosts wake it too."""
        if self._control.is_far(rank):
            self._control.receive(at_most_s)
        else:
            super().rest(rank, seen, at_most_s)

    def _left(self, other: int, how: Departure) -> PeerLostError:
        died = f"has died, its process {self._control.lines[other].pid} is gone"
        what, advice = {
            Departure.FINISHED: ("has finished its program", _SAME_CALLS),
            Departure.DIED: (died, _START_AGAIN),
            Departure.UNREACHABLE: ("cannot be reached any more", _START_AGAIN),
        }.get(how, ("has failed", _SAME_CALLS))
        return PeerLostError(
            f"every worker must come to this point of step {self._line.step}, "
            f"but rank {other} {what} ({self.last_seen(other)}) while rank {self.rank} waits for "
            f"it: {advice}",
            rank=other,
        )

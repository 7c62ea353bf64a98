"""The control block that launcher and workers share: how far each has come, and who has left.

One memfd: a head, four cache lines a rank, then one mailbox a rank::

    head     │ wish u32 │ end u32 │ token                                        64 bytes
    line r   │ arrivals u32 │ departure u32 │ step i64 │ purpose │ purpose │     64 bytes
             │ plan: step i64 │ plan: what u32 │ process i64 │ started i64 │     64 bytes
             │ times: step i64 │ seven f64 │ the same of another step │       2 × 64 bytes
             │ waits: count u32 │ what for │                               2 × 64 bytes
    mailbox r│ length u64   │ bytes …                                            64 KiB

Each line is written by its rank alone (`departure` and the head by the launcher alone), so no locks
are needed. Where there is no launcher of ours, rank 0 creates the control block
(`host_rendezvous.py`), each takes its seat in it by writing which process it is, and whoever sees
another one dead writes its `departure`.

Purposes say what the last two arrivals were for: nobody can be two meetings ahead. A plan says what
everybody does before a certain step; it is made between the two meetings of the step before, so
whoever passes the second reads this one, and nobody still reads the one before.
A launcher creates the control block, so that it outlives every worker; it does not need torch.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
from collections.abc import Sequence

from unisono.workers import futex

LINE_BYTES = 384
MAILBOX_BYTES = 64 * 1024
_LENGTH_BYTES = 8
_HEAD_BYTES = 64
_ARRIVALS, _DEPARTURE, _STEP, _PURPOSES, _PLAN_STEP, _PLAN = 0, 4, 8, 16, 64, 72
_PROCESS, _STARTED = 80, 88
_TIMES, _TIMES_BYTES = 128, 64
NUM_TIMES = 7
_TOLD = struct.Struct(f"=q{NUM_TIMES}d")  # a step, and its times
PURPOSE_BYTES = 24
_WAITS, WAIT_BYTES = 256, 124
_TOKEN, TOKEN_BYTES = 16, 16
PAGE_NAME = "unisono-control"


class Departure(enum.IntEnum):
    """Whether a worker may still come to a barrier; a lost one is made up for by the others.

    DIED is said of one that nobody can make up for: there is no launcher of ours.
    """

    PRESENT = 0
    FINISHED = 1
    FAILED = 2
    LOST = 3
    DIED = 4


class ControlBlock:
    """The mapped control block. Final; made by :meth:`create` or :meth:`attach`."""

    def __init__(self, fd: int, world_size: int) -> None:
        self.fd = fd
        self.world_size = world_size
        self._map = mmap.mmap(fd, control_block_bytes(world_size))
        self._words = (ctypes.c_uint32 * (len(self._map) // 4)).from_buffer(self._map)
        self._longs = (ctypes.c_int64 * (len(self._map) // 8)).from_buffer(self._map)
        self._doubles = (ctypes.c_double * (len(self._map) // 8)).from_buffer(self._map)
        self._address = ctypes.addressof(self._words)

    @classmethod
    def create(cls, world_size: int) -> ControlBlock:
        """Make a fresh control block for `world_size` workers; a launcher does, or else rank 0."""
        fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, control_block_bytes(world_size))
        return cls(fd, world_size)

    @classmethod
    def attach(cls, fd: int, world_size: int) -> ControlBlock:
        """Map the control block behind an inherited `fd`."""
        return cls(fd, world_size)

    def arrivals(self, rank: int) -> int:
        """Count the barriers that `rank` has come to, modulo 2³²."""
        return self._words[_line(rank, _ARRIVALS) // 4]

    def arrive(self, rank: int) -> None:
        """Count one more arrival of `rank`, after all that it wrote, and wake the others."""
        futex.add_and_wake(self._address + _line(rank, _ARRIVALS))

    def acquire(self, rank: int) -> None:
        """Order this worker's later reads after the arrivals it has just seen."""
        futex.acquire(self._address + _line(rank, _ARRIVALS))

    def sleep_until_arrival(self, rank: int, seen: int, timeout_s: float) -> None:
        """Sleep while `rank` has come to `seen` barriers; wakes when it arrives or leaves."""
        futex.wait(self._address + _line(rank, _ARRIVALS), seen, timeout_s)

    def departure(self, rank: int) -> Departure:
        """Tell whether `rank` has left."""
        return Departure(self._words[_line(rank, _DEPARTURE) // 4])

    def leave(self, rank: int, how: Departure) -> None:
        """Mark that `rank` will never come to a barrier again and wake whoever waits for it."""
        self._words[_line(rank, _DEPARTURE) // 4] = int(how)
        futex.wake(self._address + _line(rank, _ARRIVALS))

    def come_back(self, rank: int, arrivals: int) -> None:
        """Mark that somebody has taken the seat of `rank` and counts meetings from `arrivals`.

        Only while nobody waits for `rank`, and before anybody is told to.
        """
        self._words[_line(rank, _ARRIVALS) // 4] = arrivals
        self._words[_line(rank, _DEPARTURE) // 4] = int(Departure.PRESENT)

    def step(self, rank: int) -> int:
        """Tell the step that `rank` was last seen in."""
        return self._longs[_line(rank, _STEP) // 8]

    def set_step(self, rank: int, step: int) -> None:
        """Note the step that `rank` is in, for those who wait for it."""
        self._longs[_line(rank, _STEP) // 8] = step

    def plan(self, rank: int, step: int) -> int:
        """Read what `rank` has planned before `step`; 0 for nothing."""
        if self._longs[_line(rank, _PLAN_STEP) // 8] != step:
            return 0
        return self._words[_line(rank, _PLAN) // 4]

    def set_plan(self, rank: int, step: int, what: int) -> None:
        """Plan something before `step`, which nobody can have come to."""
        self._words[_line(rank, _PLAN) // 4] = what
        self._longs[_line(rank, _PLAN_STEP) // 8] = step

    @property
    def wish(self) -> bool:
        """Whether the launcher wishes that all workers stop between two steps."""
        return bool(self._words[0])

    @wish.setter
    def wish(self, value: bool) -> None:
        self._words[0] = int(value)

    @property
    def end(self) -> int:
        """Which signal asks the job to end after the step under way; 0: none."""
        return self._words[1]

    @end.setter
    def end(self, signum: int) -> None:
        self._words[1] = signum

    @property
    def token(self) -> bytes:
        """What tells this control block from all others, where it has to be found; else zero."""
        return self._map[_TOKEN : _TOKEN + TOKEN_BYTES]

    @token.setter
    def token(self, value: bytes) -> None:
        self._map[_TOKEN : _TOKEN + TOKEN_BYTES] = value

    def process(self, rank: int) -> tuple[int, int]:
        """Tell which process is `rank` and when it started; zeros while nobody has come.

        Half of it is never told, also while that process is writing it.
        """
        pid = self._longs[_line(rank, _PROCESS) // 8]
        started = self._longs[_line(rank, _STARTED) // 8]
        # Whichever of the two a processor lets us see first.
        return (pid, started) if pid and started else (0, 0)

    def set_process(self, rank: int, pid: int, started: int) -> None:
        """Say which process is `rank`."""
        self._longs[_line(rank, _STARTED) // 8] = started
        self._longs[_line(rank, _PROCESS) // 8] = pid

    def set_times(self, rank: int, step: int, times: Sequence[float]) -> None:
        """Say where `rank` spent a step, in seconds; it stays until the next but one is told."""
        at = _line(rank, _TIMES) + step % 2 * _TIMES_BYTES
        self._longs[at // 8] = -1
        self._doubles[at // 8 + 1 : at // 8 + 1 + NUM_TIMES] = list(times)
        self._longs[at // 8] = step

    def times(self, rank: int, step: int) -> tuple[float, ...] | None:
        """Tell where `rank` spent a step; None if it has not said, or has said another since."""
        at = _line(rank, _TIMES) + step % 2 * _TIMES_BYTES
        told = _TOLD.unpack_from(self._map, at)
        return told[1:] if told[0] == step == self._longs[at // 8] else None

    def set_purpose(self, rank: int, which: int, purpose: bytes) -> None:
        """Say what the next arrival of `rank` is for; `which` alternates between 0 and 1."""
        start = _line(rank, _PURPOSES) + which * PURPOSE_BYTES
        self._map[start : start + PURPOSE_BYTES] = purpose[:PURPOSE_BYTES].ljust(PURPOSE_BYTES)

    def purpose(self, rank: int, which: int) -> bytes:
        """Read what an arrival of `rank` is for, padded with spaces."""
        start = _line(rank, _PURPOSES) + which * PURPOSE_BYTES
        return self._map[start : start + PURPOSE_BYTES]

    def begin_wait(self, rank: int, what: bytes) -> None:
        """Say that `rank` waits for others elsewhere than at a meeting, and what for."""
        start = _line(rank, _WAITS) + 4
        self._map[start : start + WAIT_BYTES] = what[:WAIT_BYTES].ljust(WAIT_BYTES)
        self._words[_line(rank, _WAITS) // 4] |= 1

    def end_wait(self, rank: int) -> None:
        """Say that `rank` goes on."""
        place = _line(rank, _WAITS) // 4
        self._words[place] = (self._words[place] | 1) + 1

    def wait_of(self, rank: int) -> tuple[int, bytes | None]:
        """Tell what `rank` waits for elsewhere than at a meeting, or None.

        Returns:
            A count that changes with each such wait, and the wait under way.
        """
        count = self._words[_line(rank, _WAITS) // 4]
        start = _line(rank, _WAITS) + 4
        return count, self._map[start : start + WAIT_BYTES].rstrip() if count % 2 else None

    def post(self, rank: int, message: bytes) -> None:
        """Put at most ``MAILBOX_BYTES − 8`` bytes into the mailbox of `rank`."""
        start = self._mailbox(rank)
        self._map[start : start + _LENGTH_BYTES] = len(message).to_bytes(_LENGTH_BYTES, "little")
        self._map[start + _LENGTH_BYTES : start + _LENGTH_BYTES + len(message)] = message

    def posted(self, rank: int) -> bytes:
        """Read the mailbox of `rank`."""
        start = self._mailbox(rank)
        length = int.from_bytes(self._map[start : start + _LENGTH_BYTES], "little")
        return self._map[start + _LENGTH_BYTES : start + _LENGTH_BYTES + length]

    def close(self) -> None:
        """Give the control block's file descriptor back; the mapping goes with the object."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _mailbox(self, rank: int) -> int:
        return _line(self.world_size, 0) + rank * MAILBOX_BYTES


def _line(rank: int, field: int) -> int:
    return _HEAD_BYTES + rank * LINE_BYTES + field


def control_block_bytes(world_size: int) -> int:
    """Tell how long the control block for some workers is."""
    return _HEAD_BYTES + world_size * (LINE_BYTES + MAILBOX_BYTES)

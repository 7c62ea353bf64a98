"""Where processes of one host synchronize: none continues before all arrive or one is lost.

Each process has a seat in shared memory that counts its arrivals. A wait spins for a moment (the
others are usually microseconds away), then sleeps in the kernel, and wakes at least five times a
second to check for lost processes. The step synchronizes here (:class:`.control_block.Barrier`),
and so do the backend's collectives (``c10d/meeting.py``); each defines what follows a loss.

:func:`add_and_wake` adds to a word inside the kernel, which is atomic and a full memory barrier on
every processor: a process that sees the new value and then calls :func:`acquire` sees everything
written before. Source: futex(2), ``FUTEX_WAIT`` and ``FUTEX_WAKE_OP``.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import math
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, final

from unisono.errors import WaitTimeoutError
from unisono.runtime.notices import say
from unisono.runtime.procfs import started_at
from unisono.runtime.timeouts import NOTICE

SLEEP_AT_MOST_S = 0.2
_SPIN_S = 3e-3
_SPIN_WHEN_CROWDED_S = 2e-5
COUNTER = 2**32
_HALF = COUNTER // 2


class Departure(enum.IntEnum):
    """Whether a process may still arrive."""

    PRESENT = 0
    FINISHED = 1
    FAILED = 2
    LOST = 3  # it will be replaced, or the others continue without it
    DIED = 4  # it will not be replaced: there is no launcher of ours
    UNREACHABLE = 5  # its host no longer answers

    @property
    def may_be_back(self) -> bool:
        """Whether a worker of this rank is expected to arrive."""
        return self in (Departure.PRESENT, Departure.LOST)


class MeetingSeat(ctypes.Structure):
    """What a process publishes about itself for synchronization; the first part of its line."""

    _fields_: ClassVar[Any] = (
        ("arrivals", ctypes.c_uint32),  # modulo 2³²
        ("departure", ctypes.c_uint32),
        ("pid", ctypes.c_int64),
        ("started", ctypes.c_int64),
    )

    @property
    def process(self) -> tuple[int, int]:
        """Return the process's PID and start time; zeros before a process has arrived."""
        pid, started = self.pid, self.started
        # Half-written pairs are not returned, in whichever order a processor shows the two writes.
        return (pid, started) if pid and started else (0, 0)

    @property
    def has_died(self) -> bool:
        """Whether the process has ended; a later process with the same PID does not count."""
        pid, started = self.process
        return bool(pid) and started_at(pid) != started

    def register(self, pid: int, started: int) -> None:
        """Store which process has the seat."""
        self.started = started
        self.pid = pid

    def arrive(self) -> None:
        """Increment the arrivals after all writes of this process, and wake the others."""
        add_and_wake(ctypes.addressof(self))

    def leave(self, how: Departure) -> None:
        """Mark that the process will never arrive again, and wake the others that wait for it."""
        self.departure = int(how)
        wake(ctypes.addressof(self))


def spin_s(num_processes: int) -> float:
    """Return how long to spin before sleeping: shorter if processes outnumber the cores."""
    is_crowded = num_processes > len(os.sched_getaffinity(0))
    return _SPIN_WHEN_CROWDED_S if is_crowded else _SPIN_S


@final
class WaitClock:
    """How long a wait has lasted, for a loop that looks at least every `SLEEP_AT_MOST_S`.

    A longer pause means that this process did not run, so time in which the whole job is stopped
    (Ctrl-Z, ``scontrol suspend``, a frozen container) does not count.
    """

    def __init__(self) -> None:
        self._waited_s, self._looked_at_s = 0.0, time.monotonic()

    def look(self) -> float:
        """Return the seconds waited so far."""
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._looked_at_s, 2 * SLEEP_AT_MOST_S)
        self._looked_at_s = now_s
        return self._waited_s


class MeetingPoint(ABC):
    """One process's view of a meeting point; `names` are the ranks that messages print."""

    can_spin = True  # others may be microseconds away; False over a network

    def __init__(
        self,
        seats: Sequence[MeetingSeat],
        rank: int,
        names: Sequence[int],
        notice_after_s: float | None = None,
    ) -> None:
        self.rank, self.names = rank, names
        self._seats, self._mine = seats, ctypes.addressof(seats[rank])
        self._notice_after_s = NOTICE.in_s() if notice_after_s is None else notice_after_s
        self._others = [other for other in range(len(seats)) if other != rank]
        # There are at least as many processes as the greatest name implies.
        self.spin_s = spin_s(max(names) + 1)

    @abstractmethod
    def find_departed(self, missing: Sequence[int]) -> list[tuple[int, Departure]]:
        """Return those of `missing` that will never arrive, the most informative first."""

    @abstractmethod
    def lose(self, rank: int, how: Departure) -> None:
        """Raise because a rank is lost; if this returns, the wait stops without an error."""

    @abstractmethod
    def here(self) -> str:
        """Describe where this rank is."""

    @abstractmethod
    def last_seen(self, rank: int) -> str:
        """Describe where a rank was last seen."""

    def show(self, waited_s: float) -> None:
        """Report to others that the wait continues."""
        return

    def missing(self, ranks: Sequence[int], target: int) -> list[int]:
        """Return those of `ranks` that have not made arrival number `target`."""
        seats = self._seats
        return [rank for rank in ranks if (seats[rank].arrivals - target) % COUNTER >= _HALF]

    def await_others(
        self, target: int, timeout_s: float, patience_s: float = math.inf, *, spins: bool = True
    ) -> bool:
        """Wait until the others have made arrival number `target`; False if it stops early."""
        missing = self.missing(self._others, target)
        if missing and spins and self.can_spin:
            end = time.perf_counter() + self.spin_s
            while missing and time.perf_counter() < end:
                os.sched_yield()
                missing = self.missing(missing, target)
        if missing and not self._sleep(missing, target, timeout_s, patience_s):
            return False
        acquire(self._mine)
        return True

    def _sleep(self, missing: list[int], target: int, timeout_s: float, patience_s: float) -> bool:
        clock, is_told = WaitClock(), False
        while missing:
            seen = self._seats[missing[0]].arrivals
            lost = self.find_departed(missing)  # before checking again who has arrived
            before, missing = missing[0], self.missing(missing, target)
            for rank, how in lost:
                if rank in missing:
                    self.lose(rank, how)
                    return False
            if before not in missing:
                continue
            waited_s = clock.look()
            if waited_s >= timeout_s:
                raise self._late(missing, waited_s)
            if waited_s >= patience_s:
                return False
            self.show(waited_s)
            if waited_s >= self._notice_after_s and not is_told:
                is_told = True
                if self.rank < min(set(self._others) - set(missing), default=self.rank + 1):
                    say(self._sight(missing, waited_s))
            slice_s = min(SLEEP_AT_MOST_S, timeout_s - waited_s, patience_s - waited_s)
            self.rest(before, seen, slice_s)
        return True

    def rest(self, rank: int, seen: int, at_most_s: float) -> None:
        """Sleep until `rank`, seen with `seen` arrivals, arrives or leaves, or the time is up."""
        wait(ctypes.addressof(self._seats[rank]), seen, at_most_s)

    def _late(self, missing: Sequence[int], waited_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"{self._sight(missing, waited_s)} Giving up: look at what rank "
            f"{self.names[missing[0]]} does there, at code that not every rank runs, or at groups "
            f"whose calls ranks wait for in another order.",
            missing=tuple(self.names[rank] for rank in missing),
            waited_s=waited_s,
        )

    def _sight(self, missing: Sequence[int], waited_s: float) -> str:
        there = ", ".join(f"rank {self.names[one]} ({self.last_seen(one)})" for one in missing)
        me = f"rank {self.names[self.rank]} in {self.here()}"
        return f"{me} has waited {waited_s:.1f} s for {there}."


_SYSCALL_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 202)
_READS_STAY_IN_ORDER = platform.machine() == "x86_64"
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_OP_ADD = 1
_EVERYONE = 2**31 - 1
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,  # which system call
    ctypes.c_void_p,  # the word
    ctypes.c_int,  # operation
    ctypes.c_uint32,  # value expected, or how many to wake
    ctypes.c_void_p,  # timeout
    ctypes.c_void_p,  # the word that FUTEX_WAKE_OP changes
    ctypes.c_uint32,  # how FUTEX_WAKE_OP changes it
)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`; may return spuriously."""
    timespec = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _call(address, _WAIT, expected, ctypes.addressof(timespec))


def wake(address: int) -> None:
    """Wake all that sleep on the word at `address`."""
    _call(address, _WAKE, _EVERYONE)


def add_and_wake(address: int, amount: int = 1) -> None:
    """Add `amount` (0 … 2047) to the word at `address`, then wake all that sleep on it."""
    operation = (_OP_ADD << 28) | (amount << 12)
    _call(address, _WAKE_OP, _EVERYONE, 0, address, operation)


def acquire(address: int) -> None:
    """Order later reads after earlier ones; `address` is of a word that this process owns."""
    if not _READS_STAY_IN_ORDER:
        add_and_wake(address, 0)


def _call(
    address: int, operation: int, value: int, timeout: int = 0, second: int = 0, encoded: int = 0
) -> None:
    if _syscall(_SYSCALL_NUMBER, address, operation, value, timeout, second, encoded) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, f"futex: {os.strerror(code)}")

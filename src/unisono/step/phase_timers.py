"""Timers for the phases of a step on one worker."""

from __future__ import annotations

import contextlib
import enum
import math
import os
from time import perf_counter

_ALWAYS_S = 1e-3  # a step that takes as long: to read delays costs far less than a hundredth of it
_ELSE_EVERY = 8
_PATH = "/proc/thread-self/schedstat"
_BYTES = 64
_NANOSECONDS_S = 1e-9


class Phase(enum.IntEnum):
    """What a worker does in a step; the index of its seconds in :attr:`PhaseTimers.times`."""

    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    WAITING = 4
    SUMMING = 5
    UPDATING = 6


DELAYED = 7
"""The index of the seconds in which it waited for a free core."""


class RunDelay:
    """Reads how long the thread that made this has waited for a core. Final; to be closed.

    ``/proc/thread-self/schedstat`` (Documentation/scheduler/sched-stats.rst) has three numbers: how
    long the thread ran, how long it waited while it could have run, both in nanoseconds, and how
    often it ran. To read it takes about a microsecond.
    """

    def __init__(self, path: str = _PATH) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):  # not every kernel counts
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        """Tell how long it has waited since it began; NaN where nobody knows."""
        if self._fd < 0:
            return math.nan
        try:
            ran, waited, _ = os.pread(self._fd, _BYTES, 0).split()
            return int(waited) * _NANOSECONDS_S if int(ran) else math.nan
        except (OSError, ValueError):
            return math.nan  # the program may have closed it, and opened something else

    def close(self) -> None:
        """Give the descriptor back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class PhaseTimers:
    """Adds up the seconds of each phase. Final.

    Args:
        delay: tells how long this thread has waited for a free core; None: nobody asks.

    Attributes:
        times: when the step began, on the clock of ``perf_counter``, then the seconds of each
            phase, then those of the phases before the first meeting in which this worker waited
            for a free core: NaN where that is not known, as in most steps that take less than a
            millisecond. That clock is the same one for all processes of a Linux host.
        are_delays_sought: whether to look for these: the kernel's code for it is in no cache
            after a step's passes, so that it takes some 10 µs.
    """

    def __init__(self, delay: RunDelay | None = None) -> None:
        self._delay = delay
        self.times = [0.0] * (DELAYED + 1)
        self.are_delays_sought = True
        self._at_s = 0.0
        self._delayed_s = math.nan
        self._turn = 0

    def begin(self) -> None:
        """Begin a step."""
        if self._delay is not None:
            self._delayed_s = self._delay.seconds() if self._is_asked() else math.nan
        self._at_s = perf_counter()
        self.times = [self._at_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.nan]

    def lap(self, phase: Phase) -> None:
        """Count the time since the lap before for `phase`."""
        now_s = perf_counter()
        self.times[phase] += now_s - self._at_s
        self._at_s = now_s

    def arrive(self) -> None:
        """Come to the first meeting of a step: what it waits for from here on are the others."""
        if self._delayed_s == self._delayed_s and self._delay is not None:
            self.times[DELAYED] = self._delay.seconds() - self._delayed_s

    def close(self) -> None:
        """Ask for delays no more."""
        if self._delay is not None:
            self._delay.close()

    def _is_asked(self) -> bool:
        """Whether to look for delays in the step that begins."""
        if not self.are_delays_sought:
            return False
        self._turn += 1
        return self._turn % _ELSE_EVERY == 0 or self._at_s - self.times[0] >= _ALWAYS_S

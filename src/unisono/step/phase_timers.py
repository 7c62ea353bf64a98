"""Timers for the phases of a step on one worker."""

from __future__ import annotations

import enum
from time import perf_counter


class Phase(enum.IntEnum):
    """What a worker does in a step; the index of its seconds in :attr:`PhaseTimers.times`."""

    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    WAITING = 4
    SUMMING = 5
    UPDATING = 6


class PhaseTimers:
    """Adds up the seconds of each phase. Final.

    Attributes:
        times: when the step began, on the clock of ``perf_counter``, then the seconds of each
            phase. That clock is the same one for all processes of a Linux host.
    """

    def __init__(self) -> None:
        self.times = [0.0] * (len(Phase) + 1)
        self._at_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._at_s = perf_counter()
        self.times = [self._at_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    def lap(self, phase: Phase) -> None:
        """Count the time since the lap before for `phase`."""
        now_s = perf_counter()
        self.times[phase] += now_s - self._at_s
        self._at_s = now_s

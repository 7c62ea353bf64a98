"""How much memory of its device does this worker take? Looked at now and then, and told the others.

A look has torch's allocator put its whole table together; it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from unisono.device import Device
from unisono.workers.team import Team

EVERY_S = 0.1


class MemoryWatch:
    """Tells the others what this worker takes of its device, ten times a second at most. Final.

    Args:
        device: which; nothing is told of the CPU.
        team: the workers.
        clock: seconds.
    """

    def __init__(
        self, device: Device, team: Team, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._device, self._team, self._clock = device, team, clock
        self._due_s = 0.0

    def begin(self) -> None:
        """Look before the first step; :meth:`look` does again after it."""
        self._due_s = 0.0
        self._look()

    def look(self) -> None:
        """Look, if the last look was long enough ago."""
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._look()

    def _look(self) -> None:
        sizes = self._device.memory()
        if sizes is not None:
            self._team.note_memory(sizes)

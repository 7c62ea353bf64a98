"""What does the kernel say of a run's workers, if they are here?

An event file names processes by number, on a host. A number is believed only on that host, and only
of a process that is as old as the line that names it: numbers come again. ::

    named ──► here? ──► /proc/<pid>/stat    state, processor time, when it began
                        /proc/<pid>/status  memory
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from unisono.procfs import ProcessStat, parse_kilobytes, read_stat, read_text

_SLACK_S = 2.0  # between the kernel's clock and the one that events are written by
_LOOKS = 5  # processor time is counted in hundredths of a second: too coarse from look to look


class ProcessState(Enum):
    """What a process does; the value is the word for it."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Named:
    """A process as an event names it."""

    pid: int
    at_unix_s: float


@dataclass(frozen=True)
class Process:
    """What a process does now."""

    state: ProcessState  # unknown where nobody can tell from here
    cpu: float | None = None  # processor time a second: 1.0 for one core; None before two looks
    memory_bytes: int | None = None  # in memory, with what it shares
    peak_bytes: int | None = None  # the most that this has been
    waits_for_disk: bool = False  # whether the kernel keeps it from running, for a disk mostly


UNKNOWN = Process(ProcessState.UNKNOWN)
GONE = Process(ProcessState.GONE)


class Processes:
    """Looks at processes again and again. Final.

    Args:
        root: where the kernel tells of processes.
        clock: seconds since the boot, as the kernel counts them.
        wall: seconds since 1970.
        ticks_per_s: the unit of the kernel's times.
    """

    def __init__(
        self,
        root: Path = Path("/proc"),
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        wall: Callable[[], float] = time.time,
        ticks_per_s: int | None = None,
    ) -> None:
        self._root, self._clock, self._wall = root, clock, wall
        self._ticks_per_s = ticks_per_s or os.sysconf("SC_CLK_TCK")
        self._seen: dict[int, deque[tuple[float, ProcessStat]]] = {}

    def look(self, named: Mapping[int, Named]) -> dict[int, Process]:
        """Tell what each rank's process does now."""
        pids = {name.pid for name in named.values()}
        self._seen = {pid: seen for pid, seen in self._seen.items() if pid in pids}
        return {rank: self._look(name) for rank, name in named.items()}

    def _look(self, name: Named) -> Process:
        stat = read_stat(name.pid, self._root)
        if stat is None:
            # Where others' processes are hidden, the first one is, too.
            return GONE if (self._root / "1").exists() else UNKNOWN
        if stat.has_ended or not self._is_meant(stat, name):
            return GONE
        memory = parse_kilobytes(read_text(self._root / str(name.pid) / "status"))
        return Process(
            ProcessState.STOPPED if stat.is_stopped else ProcessState.RUNNING,
            self._cpu(name.pid, stat),
            memory.get("VmRSS"),
            memory.get("VmHWM"),
            waits_for_disk=stat.letter == "D",
        )

    def _is_meant(self, stat: ProcessStat, name: Named) -> bool:
        """Whether a process may be the one that was named: it began before."""
        age_s = self._clock() - stat.started / self._ticks_per_s
        return self._wall() - age_s <= name.at_unix_s + _SLACK_S

    def _cpu(self, pid: int, stat: ProcessStat) -> float | None:
        seen = self._seen.setdefault(pid, deque(maxlen=_LOOKS))
        if seen and seen[-1][1].started != stat.started:
            seen.clear()
        seen.append((self._clock(), stat))
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        if last_s <= first_s:
            return None
        return (last.cpu - first.cpu) / self._ticks_per_s / (last_s - first_s)

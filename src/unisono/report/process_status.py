"""What does the kernel say of a run's workers, if they are here?

An event file names processes by number, on a host. A number is believed only on that host, and only
of a process that is as old as the line that names it: numbers come again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import psutil

_SLACK_S = 2.0  # between the kernel's clock and the one that events are written by
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


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
    memory_bytes: int | None = None  # in memory, with what it shares


UNKNOWN = Process(ProcessState.UNKNOWN)
GONE = Process(ProcessState.GONE)


def processes_of(named: Mapping[int, Named]) -> dict[int, Process]:
    """Tell what each rank's process does now."""
    return {rank: _process(name) for rank, name in named.items()}


def _process(name: Named) -> Process:
    try:
        process = psutil.Process(name.pid)
        with process.oneshot():
            state = process.status()
            if state in _ENDED or process.create_time() > name.at_unix_s + _SLACK_S:
                return GONE
            memory_bytes = process.memory_info().rss
    except psutil.NoSuchProcess:
        # Where others' processes are hidden, the first one is, too.
        return GONE if psutil.pid_exists(1) else UNKNOWN
    except psutil.Error:
        return UNKNOWN
    return Process(
        ProcessState.STOPPED if state in _STOPPED else ProcessState.RUNNING, memory_bytes
    )

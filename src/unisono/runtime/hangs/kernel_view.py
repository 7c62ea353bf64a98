"""What does the kernel say about a process? Read from /proc, without the process's help.

Source: proc(5).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.runtime.notices import shown
from unisono.runtime.procfs import field, read_stat, read_text, started_at, thread_times


@dataclass(frozen=True, slots=True)
class KernelView:
    """What one look at a process has shown."""

    letter: str = ""  # its state, such as `S`; empty if it is gone
    tracer_pid: int = 0  # the process that debugs it, or 0

    @property
    def is_stopped(self) -> bool:
        """A signal has stopped it, or a debugger."""
        return self.letter in ("T", "t")

    @property
    def waits_for_disk(self) -> bool:
        """It is in an uninterruptible system call: of a disk or a network file system."""
        return self.letter == "D"

    @property
    def computes(self) -> bool:
        """It uses a processor, or would if there were a free one."""
        return self.letter == "R"


def look_at(pid: int) -> KernelView:
    """Look at the first thread of a process."""
    found = read_stat(pid)
    if found is None or found.has_ended:
        return KernelView()
    tracer_pid = field(read_text(Path(f"/proc/{pid}/status")), "TracerPid:") or 0
    return KernelView(found.letter, tracer_pid)


def children(pid: int, *, recursive: bool = False) -> list[int]:
    """List the processes that a process has started and that still run, the oldest first."""
    import psutil  # takes 15 ms, which no launcher waits for

    with suppress(psutil.NoSuchProcess):
        pids = [child.pid for child in psutil.Process(pid).children(recursive=recursive)]
        return [one for one in pids if started_at(one) is not None]
    return []


def ancestors(pid: int) -> list[int]:
    """List a process's parent, its parent and so on, but for the first process of all."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return [parent.pid for parent in psutil.Process(pid).parents() if parent.pid > 1]
    return []


def command_of(pid: int) -> str:
    """Name a process's program."""
    return shown(read_text(Path(f"/proc/{pid}/comm")).rstrip("\n")) or "a process"


def thread_time_ns(pid: int) -> int:
    """Tell how long a process's first thread has run, in nanoseconds; 0 if nobody knows."""
    times = thread_times(Path(f"/proc/{pid}"))
    return 0 if times is None else times.ran_ns

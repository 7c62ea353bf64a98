"""What does the kernel say that a process does? From /proc, without the process's help.

    /proc/<pid>/stat       state: running, asleep, stopped, waiting for a disk
    /proc/<pid>/syscall    in which system call: read(3), openat, futex
    /proc/<pid>/fd/3       and of what

Source: proc(5) and the tables of system calls of x86_64 and of the others (asm-generic/unistd.h).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.runtime.notices import shown
from unisono.runtime.procfs import field, read_stat, read_text, started_at, thread_times

_NUMBERS_ON_X86 = {
    **dict.fromkeys((0, 19, 17, 295), "read"),
    **dict.fromkeys((1, 20, 18), "write"),
    **dict.fromkeys((2, 257), "open"),
    **dict.fromkeys((35, 230), "sleep"),
    **dict.fromkeys((61, 247), "wait"),
    **dict.fromkeys((73, 72), "lock"),
    **dict.fromkeys((42, 43, 288, 45, 47, 46, 44), "network"),
    **dict.fromkeys((7, 271, 23, 270, 232, 281), "poll"),
    202: "futex",
}
_NUMBERS_ELSEWHERE = {
    **dict.fromkeys((63, 65, 67), "read"),
    **dict.fromkeys((64, 66, 68), "write"),
    56: "open",
    **dict.fromkeys((101, 115), "sleep"),
    **dict.fromkeys((260, 95), "wait"),
    **dict.fromkeys((32, 25), "lock"),
    **dict.fromkeys((203, 202, 242, 207, 212, 206, 211), "network"),
    **dict.fromkeys((72, 73, 22), "poll"),
    98: "futex",
}
_IS_X86 = platform.machine() == "x86_64"
_CALLS = _NUMBERS_ON_X86 if _IS_X86 else _NUMBERS_ELSEWHERE
_WORDS = {
    "open": "waits to open a file",
    "futex": "waits for a lock or another thread",
    "sleep": "asleep",
    "wait": "waits for another process to end",
    "lock": "waits for a lock on a file",
    "network": "waits for a network",
    "poll": "waits for something to read",
}


@dataclass(frozen=True, slots=True)
class KernelView:
    """What one look at a process has shown."""

    letter: str = ""  # its state, such as `S`; empty if it is gone
    tracer_pid: int = 0  # the process that debugs it, or 0
    wait: str = ""  # what it waits for, in words, as far as that is known

    @property
    def is_stopped(self) -> bool:
        """A signal has stopped it, or a debugger."""
        return self.letter in ("T", "t")

    @property
    def computes(self) -> bool:
        """It uses a processor, or would if there were a free one."""
        return self.letter == "R"


def look_at(pid: int) -> KernelView:
    """Look at the first thread of a process."""
    found = read_stat(pid)
    if found is None or found.has_ended:
        return KernelView()
    wait = "" if found.letter in "RTt" else _wait(pid)
    if found.letter == "D":
        wait = f"waits for a disk or a network file system{': ' * bool(wait)}{wait}"
    tracer_pid = field(read_text(Path(f"/proc/{pid}/status")), "TracerPid:") or 0
    return KernelView(found.letter, tracer_pid, wait)


def children(pid: int, *, recursive: bool = False) -> list[int]:
    """List the processes that a process has started and that still run, the oldest first.

    Args:
        pid: of the process.
        recursive: theirs too, and so on.
    """
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


def _wait(pid: int) -> str:
    """Say in which system call a process is."""
    fields = read_text(Path(f"/proc/{pid}/syscall")).split()
    try:
        number, *arguments = (int(field, 0) for field in fields)
    except ValueError:
        return ""
    return _call_in_words(pid, number, arguments)


def _call_in_words(pid: int, number: int, arguments: Sequence[int]) -> str:
    kind = _CALLS.get(number, "")
    if kind == "read":
        return f"waits to read {_opened(pid, arguments[0])}"
    if kind == "write":
        return f"waits to write to {_opened(pid, arguments[0])}"
    return _WORDS.get(kind, "")


def _opened(pid: int, fd: int) -> str:
    """Describe what a descriptor of a process is; no file system is asked, as it may not answer."""
    if fd == 0:
        return "standard input"
    path = _link(f"/proc/{pid}/fd/{fd}")
    if not path:
        return f"descriptor {fd}"
    kind, is_nameless, _ = path.partition(":[")
    return f"a {kind}" if is_nameless else shown(path)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""

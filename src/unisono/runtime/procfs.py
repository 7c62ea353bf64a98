"""What does the kernel say of a process and its control groups? Sources: proc(5), cgroups(7).

How does a process reach the memory of another one? Through /proc, where it may.

Processes of one user, on one host and in one container, may open each other's memfds as
``/proc/<pid>/fd/<fd>``: no name in a file system, no socket. A number of a process or of a
descriptor may mean something else by now, so whoever opens one checks what it is.

Which processes must not outlive the one that has started them? The kernel sees to it, with SIGKILL,
so it also reaches one that has been stopped, that computes for ever or has only begun to load::

    launcher ── starts ──► server           woken when the thread that has started it ends, and ends
    server   ── forks ──► worker            killed when its parent ends
    worker   ── forks ──► loader process    the same
    worker   ── starts ──► any other        adopted by the server, which kills it at the end
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from unisono.runtime.notices import say, shown
from unisono.runtime.timeouts import NOTICE

_MAX_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What is used of it."""

    letter: str = ""  # the state, such as `R` for running; empty if it is gone
    started: int = 0  # when the process began, in ticks since the boot
    parent: int = 0  # the process that started it
    tracer_pid: int = 0  # the process that debugs it, if :func:`look_at` has looked for one

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

    @property
    def has_ended(self) -> bool:
        """It has ended, whether or not its parent has waited for it."""
        return self.letter in ("Z", "X")


def parse_stat(text: str) -> ProcessStat | None:
    """Read the text of such a file; None for anything else. The name in it may hold anything."""
    fields = text[text.rfind(")") + 1 :].split()
    try:  # the first two fields of proc(5) end at the bracket
        return ProcessStat(fields[0], int(fields[19]), int(fields[1]))
    except (IndexError, ValueError):
        return None


def read_stat(pid: int) -> ProcessStat | None:
    """Look at a process; None if there is none."""
    return parse_stat(read_text(Path(f"/proc/{pid}/stat")))


def look_at(pid: int) -> ProcessStat:
    """Look at the first thread of a process, and for who debugs it."""
    found = read_stat(pid)
    if found is None or found.has_ended:
        return ProcessStat()
    tracer_pid = field(read_text(Path(f"/proc/{pid}/status")), "TracerPid:") or 0
    return replace(found, tracer_pid=tracer_pid)


class ThreadTimes(NamedTuple):
    """How long a thread has run, and how long it has waited for a core, in nanoseconds."""

    ran_ns: int
    waited_ns: int


def thread_times(folder: Path) -> ThreadTimes | None:
    """Look at a thread, by its folder; None: gone. 0: the kernel does not count. ``schedstat``."""
    fields = read_text(folder / "schedstat").split()
    if len(fields) != 3 or not all(field.isdecimal() for field in fields):
        return None
    return ThreadTimes(int(fields[0]), int(fields[1]))


def read_text(path: Path) -> str:
    """Read the beginning of a file of the kernel; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def field(text: str, name: str) -> int | None:
    """Read a number of lines such as ``VmRSS: 1000 kB``; None: not there."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def group_folders(controller: str, root: Path) -> Iterator[Path]:
    """List where a controller's files of this process's control group may be, v1 or v2.

    Those of the groups above it follow, up to the root: within a container, the path of the group
    may not be visible.
    """
    groups = parse_groups(read_text(root / "proc/self/cgroup"))
    base, path = root / "sys/fs/cgroup", groups.get("", "/")
    if controller in groups:
        path = groups[controller]
        with_others = ",".join(name for name in groups if name and groups[name] == path)
        candidates = (controller, with_others, "cpu,cpuacct", "cpuacct,cpu")
        base = next((base / name for name in candidates if (base / name).is_dir()), base)
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def parse_groups(text: str) -> dict[str, str]:
    """Read ``/proc/self/cgroup``: the path of the group by controller, ``""`` for v2's."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") > 1)
    return {name: path for _, names, path in lines for name in names.split(",")}


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
    """Return how long a process's first thread has run, in nanoseconds; 0 if nobody knows."""
    times = thread_times(Path(f"/proc/{pid}"))
    return 0 if times is None else times.ran_ns


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# In the environment of what Unisono starts to finish by itself, such as the process of the loggers.
OUTLIVES = {"UNISONO_OUTLIVES": "1"}
_GONE_WITHIN_S, _LOOK_AGAIN_S = 5.0, 0.005


def die_with(parent_pid: int, signum: int = signal.SIGKILL) -> bool:
    """Have the kernel signal this process when its parent ends; False if that has ended. prctl(2).

    Its parent is the thread that forked, which in a launcher may end before the process does. A
    process that is stopped before it has asked leaves when continued.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    return os.getppid() == parent_pid


def adopt_orphans() -> None:
    """Have this process become the parent of what its descendants leave behind. prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def thread_has_ended(pid: int, thread: int) -> bool:
    """Return whether a thread of a process has ended."""
    stat = parse_stat(read_text(Path(f"/proc/{pid}/task/{thread}/stat")))
    return stat is None or stat.has_ended


def below(pid: int) -> Iterator[int]:
    """List what a process has started, what that has, and so on; psutil would read all of /proc."""
    for thread in _listed(f"/proc/{pid}/task"):
        for word in read_text(Path(f"/proc/{pid}/task/{thread}/children")).split():
            yield from below(int(word))
            yield int(word)


def environ_of(pid: int) -> dict[str, str]:
    """Read the variables that a process was started with; empty where that is not allowed."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(line.split("=", 1) for line in lines if "=" in line)
    return {}


def kill_below(pid: int, *, started_by: Mapping[str, str] = MappingProxyType({})) -> None:
    """Kill what is :func:`below` a process, and return once it is gone.

    Only what has the variables `started_by`, and nothing that is to outlive the run.
    """
    until_s = time.monotonic() + _GONE_WITHIN_S
    while found := [one for one in below(pid) if _is_to_go(one, started_by)]:
        for one in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        if time.monotonic() > until_s:  # one that waits for a disk, or belongs to somebody else
            return
        time.sleep(_LOOK_AGAIN_S)


def _is_to_go(pid: int, started_by: Mapping[str, str]) -> bool:
    stat = read_stat(pid)
    if stat is None or stat.has_ended:
        return False
    environ = environ_of(pid).items()
    return started_by.items() <= environ and not OUTLIVES.items() <= environ


def _listed(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


_PAUSE_S, _PAUSE_AT_MOST_S = 0.01, 0.5

T = TypeVar("T")


class NotThereError(Exception):
    """What was looked for in another process is not there, or not any more."""


def wait_for(
    look: Callable[[float], T],
    timeout_s: float,
    late: Callable[[NotThereError], Exception],
    told: tuple[str, str] | None = None,
) -> T:
    """Look for something again and again, as long as `look` raises a NotThereError.

    It is given the seconds since the first look. `late` makes the error of the last one; `told`
    says who waits and for what, once, when it takes long.
    """
    begun_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun_s
        try:
            return look(waited_s)
        except NotThereError as error:
            if waited_s >= timeout_s:
                raise late(error) from error
        if told is not None and waited_s >= NOTICE.in_s():
            say(f"{told[0]} has waited {waited_s:.0f} s {told[1]}.")
            told = None
        # So that looking takes a tenth of the time at most, where it takes long.
        looked_s = time.monotonic() - begun_s - waited_s
        time.sleep(min(max(_PAUSE_S, 9 * looked_s), _PAUSE_AT_MOST_S))


def host_name() -> str:
    """Name what two processes have in common when one can find the other in /proc."""
    return _namespace("pid")


def network_name() -> str:
    """Name what two processes have in common when they reach each other over the loopback."""
    return _namespace("net")


def _namespace(kind: str) -> str:
    boot = read_text(Path("/proc/sys/kernel/random/boot_id")).strip() or os.uname().nodename
    return f"{boot}/{os.stat(f'/proc/self/ns/{kind}').st_ino}"


def started_at(pid: int) -> int | None:
    """Return when a process began, in ticks, which names it for ever; None when it has ended."""
    stat = read_stat(pid)
    return None if stat is None or stat.has_ended else stat.started


def create_memory(name: str, num_bytes: int) -> int:
    """Make a memfd, all zero and sparse; the descriptor is the caller's."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(pid: int, fd: int, name: str, num_bytes: int | None = None) -> int:
    """Open the memfd of a process, of this size if it is known, or raise a NotThereError."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Before opening: what an unrelated process has there may be a device or a pipe.
        if not os.readlink(path).startswith(f"/memfd:{name}"):
            raise NotThereError(f"{path} is not the memory that was told of")
        mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotThereError(f"{path} cannot be opened ({error.strerror})") from error
    if num_bytes is not None and os.fstat(mine).st_size != num_bytes:
        os.close(mine)
        raise NotThereError(f"{path} is memory of another size")
    return mine


def memories_of(pid: int, name: str) -> Iterator[tuple[int, str, os.stat_result]]:
    """List the open memfds of a process whose names begin so: number, whole name, facts."""
    try:
        numbers = [int(number) for number in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return
    for number in numbers:
        path = f"/proc/{pid}/fd/{number}"
        try:
            kind, _, called = os.readlink(path).partition(":")
            if kind == "/memfd" and called.startswith(name):
                yield number, called.removesuffix(" (deleted)"), os.stat(path)
        except OSError:  # it was closed meanwhile
            continue

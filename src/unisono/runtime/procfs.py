"""What does the kernel report about processes and control groups? Sources: proc(5), cgroups(7).

How does a process open the memory of another one? Processes of one user, on one host and in one
container, may open each other's memfds as ``/proc/<pid>/fd/<fd>``: without a name in a file system
or a socket. A PID or a descriptor may have been reused, so the opener checks what it gets.

Which processes must not outlive the process that started them? The kernel kills them with SIGKILL,
which also reaches processes that are stopped, compute for ever or have only begun to load::

    launcher ── starts ──► server           woken when the thread that started it ends, and ends
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
    """The fields used of a process's ``stat`` file."""

    letter: str = ""  # the state, such as `R` for running; empty if it is gone
    started: int = 0  # when the process started, in ticks since the boot
    parent: int = 0  # its parent process
    tracer_pid: int = 0  # the process that debugs it, if :func:`inspect_process` checked

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.letter in ("T", "t")

    @property
    def waits_for_disk(self) -> bool:
        """Whether it is in an uninterruptible system call: of a disk or a network file system."""
        return self.letter == "D"

    @property
    def computes(self) -> bool:
        """Whether it uses a processor, or would if one were free."""
        return self.letter == "R"

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, even if its parent has not waited for it."""
        return self.letter in ("Z", "X")


def parse_stat(text: str) -> ProcessStat | None:
    """Parse the text of a ``stat`` file, whose name field may hold anything; None if invalid."""
    fields = text[text.rfind(")") + 1 :].split()
    try:  # the first two fields of proc(5) end at the bracket
        return ProcessStat(fields[0], int(fields[19]), int(fields[1]))
    except (IndexError, ValueError):
        return None


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is no such process."""
    return parse_stat(read_text(Path(f"/proc/{pid}/stat")))


def inspect_process(pid: int) -> ProcessStat:
    """Return the state of a process's first thread, and its debugger."""
    found = read_stat(pid)
    if found is None or found.has_ended:
        return ProcessStat()
    tracer_pid = field(read_text(Path(f"/proc/{pid}/status")), "TracerPid:") or 0
    return replace(found, tracer_pid=tracer_pid)


class ThreadTimes(NamedTuple):
    """How long a thread has run and has waited for a core, in nanoseconds."""

    ran_ns: int
    waited_ns: int


def thread_times(folder: Path) -> ThreadTimes | None:
    """Return the times of the thread with this folder; None: gone; 0: not counted."""
    fields = read_text(folder / "schedstat").split()
    if len(fields) != 3 or not all(field.isdecimal() for field in fields):
        return None
    return ThreadTimes(int(fields[0]), int(fields[1]))


def read_text(path: Path) -> str:
    """Read the beginning of a kernel file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def field(text: str, name: str) -> int | None:
    """Return the number in a line such as ``VmRSS: 1000 kB``; None if it is missing."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def group_folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders that may have a controller's files for this process's control group.

    Works for v1 and v2. The folders of its parent groups follow, up to the root: within a
    container, the group's own path may not be visible.
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
    """Parse ``/proc/self/cgroup``: the group's path by controller, with ``""`` for v2."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") > 1)
    return {name: path for _, names, path in lines for name in names.split(",")}


def children(pid: int, *, recursive: bool = False) -> list[int]:
    """Return the running child processes of a process, the oldest first."""
    import psutil  # takes 15 ms, which launchers do not spend

    with suppress(psutil.NoSuchProcess):
        pids = [child.pid for child in psutil.Process(pid).children(recursive=recursive)]
        return [one for one in pids if started_at(one) is not None]
    return []


def ancestors(pid: int) -> list[int]:
    """Return a process's parent, its parent and so on, without the init process."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return [parent.pid for parent in psutil.Process(pid).parents() if parent.pid > 1]
    return []


def command_of(pid: int) -> str:
    """Return the name of a process's program."""
    return shown(read_text(Path(f"/proc/{pid}/comm")).rstrip("\n")) or "a process"


def thread_time_ns(pid: int) -> int:
    """Return how long a process's first thread has run, in nanoseconds; 0 if unknown."""
    times = thread_times(Path(f"/proc/{pid}"))
    return 0 if times is None else times.ran_ns


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# In the environment of processes that finish by themselves, such as the process of the loggers.
OUTLIVES = {"UNISONO_OUTLIVES": "1"}
_GONE_WITHIN_S, _LOOK_AGAIN_S = 5.0, 0.005


def die_with(parent_pid: int, signum: int = signal.SIGKILL) -> bool:
    """Request a signal to this process when its parent ends; False if it has ended. prctl(2).

    The parent is the thread that forked, which in a launcher may end before the process does. A
    process that was stopped before the request exits when it is continued.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    return os.getppid() == parent_pid


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants. prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def thread_has_ended(pid: int, thread: int) -> bool:
    """Return whether a thread of a process has ended."""
    stat = parse_stat(read_text(Path(f"/proc/{pid}/task/{thread}/stat")))
    return stat is None or stat.has_ended


def below(pid: int) -> Iterator[int]:
    """Yield a process's descendants, children before parents; psutil would read all of /proc."""
    for thread in _listed(f"/proc/{pid}/task"):
        for word in read_text(Path(f"/proc/{pid}/task/{thread}/children")).split():
            yield from below(int(word))
            yield int(word)


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it may not be read."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(line.split("=", 1) for line in lines if "=" in line)
    return {}


def kill_below(pid: int, *, started_by: Mapping[str, str] = MappingProxyType({})) -> None:
    """Kill the processes :func:`below` a process, and return once they are gone.

    Spares processes without the variables `started_by`, and those that should outlive the run.
    """
    until_s = time.monotonic() + _GONE_WITHIN_S
    while found := [one for one in below(pid) if _is_to_go(one, started_by)]:
        for one in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        if time.monotonic() > until_s:  # one that waits for a disk, or belongs to another user
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
    """What was looked for in another process does not exist, or no longer exists."""


def wait_for(
    look: Callable[[float], T],
    timeout_s: float,
    late: Callable[[NotThereError], Exception],
    told: tuple[str, str] | None = None,
) -> T:
    """Call `look` until it no longer raises a NotThereError.

    `look` gets the seconds since the first call. `late` makes the error after the timeout. `told`
    describes the waiting process and its goal, for one notice if the wait is long.
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
        # Slow calls of `look` take at most a tenth of the time.
        looked_s = time.monotonic() - begun_s - waited_s
        time.sleep(min(max(_PAUSE_S, 9 * looked_s), _PAUSE_AT_MOST_S))


def host_name() -> str:
    """Return a name that two processes share if one can find the other in /proc."""
    return _namespace("pid")


def network_name() -> str:
    """Return a name that two processes share if they reach each other over the loopback."""
    return _namespace("net")


def _namespace(kind: str) -> str:
    boot = read_text(Path("/proc/sys/kernel/random/boot_id")).strip() or os.uname().nodename
    return f"{boot}/{os.stat(f'/proc/self/ns/{kind}').st_ino}"


def started_at(pid: int) -> int | None:
    """Return when a process started, in ticks; with its PID unique. None once it has ended."""
    stat = read_stat(pid)
    return None if stat is None or stat.has_ended else stat.started


def create_memory(name: str, num_bytes: int) -> int:
    """Create a memfd, all zero and sparse; the caller owns the descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(pid: int, fd: int, name: str, num_bytes: int | None = None) -> int:
    """Open the memfd of a process, checking its size if given, or raise a NotThereError."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Check before opening: an unrelated process may have a device or a pipe there.
        if not os.readlink(path).startswith(f"/memfd:{name}"):
            raise NotThereError(f"{path} is not the expected memory")
        mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotThereError(f"{path} cannot be opened ({error.strerror})") from error
    if num_bytes is not None and os.fstat(mine).st_size != num_bytes:
        os.close(mine)
        raise NotThereError(f"{path} is memory of another size")
    return mine


def memories_of(pid: int, name: str) -> Iterator[tuple[int, str, os.stat_result]]:
    """Yield a process's open memfds whose names start with `name`: descriptor, whole name, stat."""
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


def holder_of(directory: Path) -> int | None:
    """Return which process has locked a directory, if the kernel knows. See proc(5), ``locks``."""
    try:
        inode = os.stat(directory).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, file_id, _, _ = line.split()
            if kind == "FLOCK" and file_id.endswith(f":{inode}") and int(pid) > 0:
                return int(pid)
    except (OSError, ValueError):
        pass
    return None

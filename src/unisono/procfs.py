"""What does the kernel say of a process and its control groups? Sources: proc(5), cgroups(7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_MAX_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What is used of it."""

    letter: str  # the state, such as `R` for running
    started: int  # when the process began, in ticks since the boot
    parent: int  # the process that started it

    @property
    def is_stopped(self) -> bool:
        """A signal has stopped it, or a debugger."""
        return self.letter in "Tt"

    @property
    def has_ended(self) -> bool:
        """It has ended, whether or not its parent has waited for it."""
        return self.letter in "ZX"


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


class ThreadTimes(NamedTuple):
    """How long a thread has run, and how long it has waited for a core, in nanoseconds."""

    ran_ns: int
    waited_ns: int


def thread_times(folder: Path) -> ThreadTimes | None:
    """Look at a thread; None if there is none. Some kernels count nothing: then all is 0.

    Source: Documentation/scheduler/sched-stats.rst, ``schedstat``.

    Args:
        folder: the thread's in /proc, or that of a process, for its first thread.
    """
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
    """Read a number of lines such as ``VmRSS: 1000 kB`` or ``oom_kill 3``; None: not there."""
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

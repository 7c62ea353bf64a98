"""What does a container, or a job of a batch system, allow? Read from control groups, v1 and v2.

A group's limit holds for the groups below it too, so the smallest on the way up counts. Within a
container the path of the group may not be visible; then its own root is asked.
Source: cgroups(7), the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unisono.procfs import group_folders, read_text

_NO_LIMIT = 1 << 60  # v1 writes the largest number of pages for none
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """What processes of a control group may use; None: no limit, or none that can be seen."""

    memory_bytes: int | None = None  # the limit
    memory_used_bytes: int | None = None  # how much of it is used
    # how many cores' time they may take, as `docker run --cpus` says
    num_cores: float | None = None
    num_throttled: int = 0  # how often they were stopped as they had taken it
    num_processes: int | None = None  # the limit of processes and threads
    num_processes_now: int | None = None  # how many there are


def container_limits(root: Path = Path("/")) -> ContainerLimits:
    """Read the limits of this process.

    Args:
        root: of the file system, for tests.
    """
    memory, used = _smallest(root, "memory", _memory_limit)
    cores, throttled = _smallest(root, "cpu", _core_limit)
    processes, now = _smallest(root, "pids", _process_limit)
    return ContainerLimits(memory, used, cores, throttled or 0, processes, now)


def parse_limit(text: str) -> int | None:
    """Read a limit of either version; None if there is none, or it is no number."""
    word = text.strip()
    number = int(word) if word.isdecimal() else None
    return None if number is None or number >= _NO_LIMIT else number


def parse_cpu_max(text: str) -> float | None:
    """Read v2's ``cpu.max``, such as ``150000 100000``: 1.5 cores."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def parse_count(text: str, name: str) -> int:
    """Read a number of lines such as ``nr_throttled 17``; 0 if it is not there."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return 0


def _memory_limit(folder: Path) -> tuple[int | None, int | None]:
    limit = parse_limit(read_text(folder / "memory.max"))
    if limit is not None:
        return limit, parse_limit(read_text(folder / "memory.current"))
    limit = parse_limit(read_text(folder / "memory.limit_in_bytes"))
    return limit, parse_limit(read_text(folder / "memory.usage_in_bytes"))


def _core_limit(folder: Path) -> tuple[float | None, int | None]:
    throttled = parse_count(read_text(folder / "cpu.stat"), "nr_throttled")
    cores = parse_cpu_max(read_text(folder / "cpu.max"))
    if cores is None:
        quota = read_text(folder / "cpu.cfs_quota_us").strip()
        cores = parse_cpu_max(f"{quota} {read_text(folder / 'cpu.cfs_period_us').strip()}")
    return cores, throttled


def _process_limit(folder: Path) -> tuple[int | None, int | None]:
    limit = parse_limit(read_text(folder / "pids.max"))
    return limit, parse_limit(read_text(folder / "pids.current"))


def _smallest(
    root: Path, controller: str, read: Callable[[Path], tuple[N | None, int | None]]
) -> tuple[N | None, int | None]:
    """Find the smallest limit on the way up, and what was read beside it."""
    found: list[tuple[N, int | None]] = []
    for folder in group_folders(controller, root):
        limit, beside = read(folder)
        if limit is not None:
            found.append((limit, beside))
    return min(found, key=lambda pair: pair[0]) if found else (None, None)

"""How busy is this machine, and how much of it may this program use? From the kernel, in two looks.

::

    /proc/stat            processor time of all, and what a hypervisor took; who wants to run
    /proc/<pid>/stat      processor time of the workers
    <cgroup>/cpu.stat     how long a container's limit has stopped its processes

Sources: proc(5), Documentation/admin-guide/cgroup-v2.rst. What cannot be read is not told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.procfs import group_folders, read_stat, read_text

_MAX_BYTES = 1 << 20  # /proc/stat has a number for each interrupt
_CPU_FIELDS = 8  # user nice system idle iowait irq softirq steal
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_CROWDED = 1.1  # times the cores: so many that want to run have to share them
_LITTLE = 0.02
_NANOSECONDS_S, _MICROSECONDS_S = 1e-9, 1e-6


@dataclass(frozen=True, slots=True)
class LoadLook:
    """What one look has shown, in seconds since some beginning."""

    at_s: float  # when
    busy_s: float | None  # of all cores together; None where nobody knows
    stolen_s: float | None  # likewise
    workers_s: float  # processor time of the workers
    throttled_s: float | None  # how long the container's limit has stopped it
    runnable: int | None  # how many threads want to run just now


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """How busy the machine was between two looks."""

    cores: int  # that the workers may use
    busy: float | None  # how many cores all programs used together; None where nobody knows
    workers: float  # how many the workers used
    stolen: float = 0.0  # the part of the cores' time that a hypervisor took
    throttled: float = 0.0  # the part of the time in which a container's limit stopped it
    runnable: float | None = None  # how many threads wanted to run; None where nobody knows

    @property
    def is_crowded(self) -> bool:
        """Whether more want to run than there are cores, so that some wait."""
        wanting = self.runnable if self.runnable is not None else self.busy
        return self.throttled > _LITTLE or (wanting or 0.0) > _CROWDED * self.cores

    @property
    def in_words(self) -> str:
        """Who uses the cores."""
        said = [f"{_of(self.cores, 'core')}, of which the workers use {self.workers:.1f}"]
        if self.busy is not None and self.busy - self.workers >= _LITTLE * self.cores:
            said.append(f"other programs {self.busy - self.workers:.1f}")
        if self.throttled > _LITTLE:
            said.append(f"the container's limit stops them {self.throttled:.0%} of the time")
        if self.stolen > _LITTLE:
            said.append(f"the hypervisor takes {self.stolen:.0%}")
        return ", ".join(said).replace("%", " %")

    @property
    def as_json(self) -> dict[str, float | int | None]:
        """The same as plain JSON."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def load_between(first: LoadLook, last: LoadLook, cores: int) -> MachineLoad | None:
    """Find how busy the machine was; None if no time has passed."""
    passed_s = last.at_s - first.at_s
    if passed_s <= 0 or cores < 1:
        return None

    def rate(begin_s: float | None, end_s: float | None) -> float | None:
        return None if begin_s is None or end_s is None else max(end_s - begin_s, 0.0) / passed_s

    runnable = [one.runnable for one in (first, last) if one.runnable is not None]
    return MachineLoad(
        cores,
        rate(first.busy_s, last.busy_s),
        rate(first.workers_s, last.workers_s) or 0.0,
        min((rate(first.stolen_s, last.stolen_s) or 0.0) / cores, 1.0),
        min(rate(first.throttled_s, last.throttled_s) or 0.0, 1.0),
        sum(runnable) / len(runnable) if runnable else None,
    )


class LoadWatch:
    """Looks at the machine now and then. Final.

    Args:
        clock: seconds.
        root: where the kernel tells of processes and of control groups.
    """

    def __init__(self, clock: Callable[[], float], root: Path = Path("/")) -> None:
        self._clock, self._root = clock, root
        self._ticks_s = 1 / os.sysconf("SC_CLK_TCK")
        self._throttling = _throttling_file(root)
        self._before: LoadLook | None = None

    def look(self, pids: Iterable[int]) -> MachineLoad | None:
        """Say how busy the machine was since the look before; None at the first."""
        before, self._before = self._before, self._look(pids)
        cores = len(os.sched_getaffinity(0))
        return None if before is None else load_between(before, self._before, cores)

    def _look(self, pids: Iterable[int]) -> LoadLook:
        proc = self._root / "proc"
        stats = [read_stat(pid, proc) for pid in pids]
        workers_s = sum(stat.cpu for stat in stats if stat is not None) * self._ticks_s
        busy, stolen, runnable = parse_proc_stat(read_text(proc / "stat", _MAX_BYTES))
        return LoadLook(
            self._clock(),
            None if busy is None else busy * self._ticks_s,
            None if stolen is None else stolen * self._ticks_s,
            workers_s,
            parse_throttling(read_text(self._throttling)) if self._throttling else None,
            runnable,
        )


def parse_proc_stat(text: str) -> tuple[int | None, int | None, int | None]:
    """Read /proc/stat: ticks of all cores that were busy, and stolen; how many want to run."""
    busy = stolen = runnable = None
    for line in text.splitlines():
        name, *fields = line.split()[: _CPU_FIELDS + 1] or [""]
        numbers = [int(one) for one in fields if one.isdecimal()]
        if name == "cpu" and len(numbers) == _CPU_FIELDS:
            stolen = numbers[_STEAL]
            busy = sum(numbers) - numbers[_IDLE] - numbers[_IOWAIT] - stolen
        elif name == "procs_running" and len(numbers) == 1:
            runnable = numbers[0]
    return busy, stolen, runnable


def parse_throttling(text: str) -> float | None:
    """Read a cgroup's cpu.stat: how long its limit has stopped it, in seconds."""
    units = {"throttled_usec": _MICROSECONDS_S, "throttled_time": _NANOSECONDS_S}
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name in units and number.strip().isdecimal():
            return int(number) * units[name]
    return None


def _throttling_file(root: Path) -> Path | None:
    """Find the file that tells of this process's limit; None if there is none."""
    files = (folder / "cpu.stat" for folder in group_folders("cpu", root))
    return next((file for file in files if file.exists()), None)


def _of(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

"""Reads what the machine says of itself, for the verdicts of ``machine_checks.py``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from unisono.doctor import machine_checks as checks
from unisono.doctor.container_limits import container_limits
from unisono.doctor.diagnoses import Diagnosis, Probe
from unisono.hangs.sampler import sample
from unisono.procfs import parse_kilobytes, read_text
from unisono.workers.proc import create_memory

_STA_UNSYNC = 0x40  # of adjtimex(2)
_LOOK_S = 0.2
_RESOLVE_S = 2.0
_CHILD = "import time; time.sleep(30)"


def machine_probes(root: Path = Path("/")) -> dict[str, Probe]:
    """Give the checks of the machine, by name.

    Args:
        root: where /proc, /sys and /dev/shm are, for tests.
    """

    def cores() -> Iterator[Diagnosis]:
        governor = read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
        usable = sorted(os.sched_getaffinity(0))
        limits = container_limits(root)
        yield from checks.judge_cores(os.cpu_count() or 1, usable, limits, governor.strip())

    def load() -> Iterator[Diagnosis]:
        word = read_text(root / "proc/loadavg").split()[0]
        yield checks.judge_load(float(word), len(os.sched_getaffinity(0)))

    def memory() -> Iterator[Diagnosis]:
        known = parse_kilobytes(read_text(root / "proc/meminfo"))
        total = known.get("MemTotal", 0)
        available = known.get("MemAvailable", known.get("MemFree", 0))
        yield checks.judge_memory(total, available, container_limits(root))

    def shared_memory() -> Iterator[Diagnosis]:
        path = root / "dev/shm"
        total: int | None = None
        free = 0
        with contextlib.suppress(FileNotFoundError):
            found = os.statvfs(path)
            total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        yield checks.judge_shared_memory(total, free, str(path))

    def processes() -> Iterator[Diagnosis]:
        room = _limit(resource.RLIMIT_NPROC)
        if os.geteuid() == 0:
            room = None  # root's processes are not counted
        yield checks.judge_processes(container_limits(root), room)

    def locked_memory() -> Iterator[Diagnosis]:
        adapters = _names(root / "sys/class/infiniband")
        yield checks.judge_locked_memory(_limit(resource.RLIMIT_MEMLOCK), adapters)

    def clock() -> Iterator[Diagnosis]:
        place = "sys/devices/system/clocksource/clocksource0/current_clocksource"
        source = read_text(root / place).strip()
        yield checks.judge_clock(source, time.time(), _drift_s(), _is_synchronized())

    def stacks() -> Iterator[Diagnosis]:
        scope = read_text(root / "proc/sys/kernel/yama/ptrace_scope").strip()
        yield checks.judge_looking(_trouble_with_looking(), scope)

    return {
        "cores": cores,
        "load": load,
        "memory": memory,
        "memory-of-workers": _memfd,
        "shared-memory": shared_memory,
        "processes": processes,
        "open-files": _open_files,
        "locked-memory": locked_memory,
        "temporary-files": _temporary_files,
        "clock": clock,
        "network": _network,
        "stacks": stacks,
    }


def _limit(what: int, *, hard: bool = False) -> int | None:
    number = resource.getrlimit(what)[hard]
    return None if number == resource.RLIM_INFINITY else number


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _memfd() -> Iterator[Diagnosis]:
    trouble = ""
    try:
        os.close(create_memory("unisono-doctor", 4096))
    except (OSError, AttributeError) as error:
        trouble = str(error)
    yield checks.judge_memfd(trouble)


def _open_files() -> Iterator[Diagnosis]:
    kind = resource.RLIMIT_NOFILE
    yield checks.judge_open_files(_limit(kind), _limit(kind, hard=True))


def _temporary_files() -> Iterator[Diagnosis]:
    try:
        path = tempfile.gettempdir()
    except FileNotFoundError:
        yield checks.judge_temporary("The folder for temporary files", 0, False)
        return
    found = os.statvfs(path)
    yield checks.judge_temporary(path, found.f_bavail * found.f_frsize, os.access(path, os.W_OK))


def _drift_s() -> float:
    """Tell by how much the two clocks move apart in a moment."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_LOOK_S)
    return (time.time() - wall) - (time.monotonic() - steady)


class _Timex(ctypes.Structure):
    """The beginning of what adjtimex(2) fills in."""

    _fields_ = (
        ("modes", ctypes.c_int),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    )


def _is_synchronized() -> bool | None:
    """Ask the kernel whether NTP sets its clock; None: it does not say."""
    found = _Timex()
    try:
        failed = ctypes.CDLL(None).adjtimex(ctypes.byref(found)) < 0
    except (AttributeError, OSError):
        return None
    return None if failed else not found.status & _STA_UNSYNC


def _network() -> Iterator[Diagnosis]:
    interfaces = [name for _, name in socket.if_nameindex()]
    has_loopback = False
    with contextlib.suppress(OSError), socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        has_loopback = True
    yield checks.judge_network(interfaces, has_loopback, _knows_itself())


def _knows_itself() -> bool | None:
    """Tell whether this host's name has an address; a name server may take its time."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(bool(socket.getaddrinfo(socket.gethostname(), None)))
        except OSError:
            answers.append(False)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVE_S)
    return answers[0] if answers else None


def _trouble_with_looking() -> str:
    """Read the stack of a child; return why that cannot be done, or nothing."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", _CHILD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(_LOOK_S)
        return sample([child.pid])[child.pid].trouble
    finally:
        child.kill()
        child.wait()

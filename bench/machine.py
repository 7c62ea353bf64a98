"""On what was it measured? Facts about the machine and the versions, for the JSON file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]


def facts() -> dict[str, Any]:
    """Collect what a reader needs to judge the numbers."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "unisono": version("unisono"),
        "commit": _commit(),
    }


class Others:
    """What other processes use while this one and those it starts are measuring. Final."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float:
        """Tell how many processors others kept busy so far, on average."""
        busy_s = _busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, busy_s) / (time.monotonic() - self._began_s)

    def __str__(self) -> str:
        return (
            f"Other processes kept {self.cores():.2f} of {os.cpu_count()} processors busy "
            f"meanwhile; ratios are worth quoting where that is near 0."
        )


def _busy_s() -> float:
    """Sum up what all processors have done, what the host took away from them included."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    seconds = {
        name: int(count) / os.sysconf("SC_CLK_TCK")
        for name, count in zip(names, ticks, strict=False)
    }
    return sum(seconds.values()) - seconds["idle"] - seconds["iowait"]


def _own_s() -> float:
    """Sum up the processor time of this process and of all that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Name the commit, with a mark when files differ from it; empty outside a git checkout."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

"""Running the command as a user does, and finding its processes; or watching made-up ones."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.warm import processes

from unisono.runtime.launch import stall_watch
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.membership import Membership

PROGRAMS = Path(__file__).parent / "programs"
ENDED_S = 30.0  # on a machine where others compute, too
COMMAND = [sys.executable, "-m", "unisono", "run"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def unisono_run() -> Run:
    """Run the command to its end, started by `popen`: a fork that has loaded torch, by default."""

    def run(
        *arguments: object, popen: type[subprocess.Popen[str]] = processes.start, **options: object
    ) -> subprocess.CompletedProcess[str]:
        return processes.run([*COMMAND, *map(str, arguments)], popen=popen, **options)

    return run


class Running:
    """A job of two workers in the middle of its work, and all its processes."""

    def __init__(self, popen: type[subprocess.Popen[str]], **options: object) -> None:
        command = [*COMMAND, "-n", "2", str(PROGRAMS / "wait.py")]
        self.launcher = popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        assert self.launcher.stdout is not None
        pids = [int(self.launcher.stdout.readline()) for _ in range(2)]
        self.workers = [psutil.Process(pid) for pid in pids]
        self.server = self.workers[0].parent()
        self.all = [psutil.Process(self.launcher.pid), self.server, *self.workers]

    def alive(self) -> list[psutil.Process]:
        return [process for process in self.all if lives(process)]

    def all_go(self) -> bool:
        """Wait for their ends, for long: how soon they come is tested in test_policy.py."""
        deadline = time.monotonic() + ENDED_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.alive()

    def end(self) -> None:
        for process in self.alive():
            process.kill()
        self.launcher.communicate()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a job; as a user does where the start itself is looked at, with `subprocess.Popen`."""
    started: list[Running] = []

    def start(popen: type[subprocess.Popen[str]] = processes.start, **options: object) -> Running:
        started.append(Running(popen, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


def lives(process: psutil.Process) -> bool:
    # Nobody may be there to bury what has lost its parent.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Kernel:
    """What a watch sees: the time, and processes that have run so long."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.processes: dict[int, tuple[int, bool]] = {}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(stall_watch, "time", SimpleNamespace(monotonic=lambda: kernel.now_s))
    monkeypatch.setattr(stall_watch, "processor_time", lambda pid: kernel.processes.get(pid))
    return kernel


@pytest.fixture
def page() -> Iterator[ControlBlock]:
    page = ControlBlock.create(3)
    yield page
    page.close()


# Of the workers whose control block is `page`.
PIDS = {0: 10, 1: 11, 2: 12}
ALL = Membership((0, 1, 2), leader=0)

"""Whoever kills the launcher ends the whole job, also processes that stand still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from tests.chaos.jobs import gone_within
from tests.launch.conftest import COMMAND, PROGRAMS
from tests.promises import promise
from tests.warm import processes

from unisono.runtime.launch import forkserver

WITHIN_S = 30.0


@pytest.fixture
def started() -> Iterator[object]:
    """Start a program and read the pids that it prints; all that is left ends with the test."""
    launchers: list[subprocess.Popen[str]] = []
    seen: list[psutil.Process] = []

    def start(
        *arguments: object, pids: int, popen: type[subprocess.Popen[str]]
    ) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        launcher = popen(
            [sys.executable, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        launchers.append(launcher)
        assert launcher.stdout is not None
        said: set[int] = set()
        while len(said) < pids:  # each has begun its work, but who compared samples has ended
            said = {*filter(psutil.pid_exists, said), int(launcher.stdout.readline())}
        below = psutil.Process(launcher.pid).children(recursive=True)
        seen.extend(below)
        return launcher, below

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
        assert launcher.stdout is not None
        launcher.stdout.close()
    for process in gone_within(seen, 0):
        process.kill()
    gone_within(seen, WITHIN_S)


def test_a_new_fork_of_the_server_does_not_look_for_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: object) -> None:
        raise SystemExit

    handlers: dict[int, Callable[..., None]] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(forkserver, "adopt_orphans", lambda: None)
    monkeypatch.setattr(forkserver, "die_with", lambda *_: False)  # `main` ends there
    monkeypatch.setattr(forkserver, "_end_all", end)
    with pytest.raises(SystemExit):
        forkserver.main(0, -1, 0)
    with pytest.raises(SystemExit):  # its parent is not the launcher
        handlers[signal.SIGCONT](signal.SIGCONT, None)
    fork_pid = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: fork_pid)
    handlers[signal.SIGCONT](signal.SIGCONT, None)


def server_of(launcher: subprocess.Popen[str]) -> psutil.Process:
    (server,) = (
        child
        for child in psutil.Process(launcher.pid).children()
        if "unisono.runtime.launch.forkserver" in " ".join(child.cmdline())
    )
    return server


def stop(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.suspend()


@promise("nothing-lost.9")
@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param("the server", marks=pytest.mark.long), "all"])
def test_a_killed_launcher_takes_those_along_who_stand_still(started, who) -> None:
    run = COMMAND[1:]
    popen = subprocess.Popen if who == "the server" else processes.start
    launcher, below = started(*run, "-n", "2", PROGRAMS / "load.py", pids=6, popen=popen)
    assert len(below) == 7  # the server, two workers, two loader processes each
    stop([server_of(launcher)] if who == "the server" else below)
    launcher.kill()
    assert gone_within(below, WITHIN_S) == []


@pytest.mark.slow
def test_a_server_that_stands_still_while_it_loads_goes_with_its_launcher() -> None:
    code = (
        "import os, signal, time\n"
        "from unisono.runtime.launch.forkserver import ForkServer\n"
        "server = ForkServer.start(dict(os.environ))\n"
        "while 'libtorch' not in open(f'/proc/{server.pid}/maps').read():\n"
        "    time.sleep(0.001)\n"
        "os.kill(server.pid, signal.SIGSTOP)\n"
        "print(server.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        server = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
    try:
        assert gone_within([server], WITHIN_S) == []
    finally:
        if server.is_running():
            os.kill(server.pid, signal.SIGKILL)

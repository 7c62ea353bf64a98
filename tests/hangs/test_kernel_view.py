"""What real processes do, as the kernel says it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unisono.runtime.hangs.kernel_view import KernelView, ancestors, children, look_at

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def run(code: str, *arguments: object, **options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
        started.append(subprocess.Popen(command, **options))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def seen(pid: int, is_there: Callable[[KernelView], bool]) -> KernelView:
    """Look until something is there, or too long."""
    until_s = time.monotonic() + 20
    while not is_there(view := look_at(pid)) and time.monotonic() < until_s:
        time.sleep(0.01)
    return view


def test_one_that_computes_or_is_stopped_is_seen_to(start: Start) -> None:
    process = start("while True: pass")
    assert seen(process.pid, lambda view: view.computes).computes
    process.send_signal(signal.SIGSTOP)
    view = seen(process.pid, lambda view: view.is_stopped)
    assert (view.letter, view.tracer_pid) == ("T", 0)


def test_one_that_waits_for_a_disk_is_seen_to(start: Start, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    code = (
        "import os, sys; opens = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0); "
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[opens])"
    )
    process = start(code, fifo)
    view = seen(process.pid, lambda view: view.waits_for_disk)
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    assert view.waits_for_disk


def test_one_that_is_gone_is_nowhere() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert look_at(process.pid) == KernelView()  # dead, not buried
    assert look_at(process.pid) == KernelView()


def test_families_are_found(start: Start) -> None:
    process = start("import os, time; os.fork(); time.sleep(99)")
    until_s = time.monotonic() + 20
    while not (found := children(process.pid)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert process.pid in children(os.getpid())
    assert {process.pid, *found} <= set(children(os.getpid(), recursive=True))
    assert ancestors(found[0])[:2] == [process.pid, os.getpid()]
    os.kill(found[0], signal.SIGKILL)

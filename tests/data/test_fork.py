"""What is tried in a fork says its answer or nothing, whatever fails, and outlives nobody."""

import contextlib
import errno
import os
import resource
import signal
import sys
import time

import psutil
import pytest
from tests.chaos.jobs import gone_within
from tests.warm.processes import start

from unisono.data.fork import said_by_fork


@pytest.mark.parametrize("call", ["pipe", "fork", "read", "kill", "waitpid"])
def test_no_failure_of_the_system_is_raised(call, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    children = []
    fork, waitpid, kill = os.fork, os.waitpid, os.kill

    def forked():
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", forked)
    monkeypatch.setattr(os, call, fail)
    said = said_by_fork(lambda: b"1", 10.0)
    assert said == b"" if call in ("pipe", "fork", "read") else said in (b"", b"1")
    monkeypatch.undo()
    for child in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            kill(child, signal.SIGKILL)
            waitpid(child, 0)


def test_a_process_may_have_many_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert said_by_fork(lambda: b"2", 10.0) == b"2"
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_may_let_the_system_bury_its_children():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert said_by_fork(lambda: b"2", 10.0) == b"2"
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("timeout_s", [0.05, -2.0])
def test_work_that_hangs_holds_nobody_up(timeout_s):
    assert said_by_fork(lambda: time.sleep(600) or b"1", timeout_s) == b""


@pytest.mark.slow
def test_it_ends_with_a_process_that_is_killed(tmp_path):
    code = (
        "import os, pathlib, sys, time\n"
        "from unisono.data.fork import said_by_fork\n"
        "beside = pathlib.Path(sys.argv[1])\n"
        "def work():\n"
        "    beside.write_text(str(os.getpid()))\n"
        "    beside.rename(sys.argv[2])\n"
        "    time.sleep(600)\n"
        "said_by_fork(work, 600.0)\n"
    )
    told = tmp_path / "pid"
    with start([sys.executable, "-c", code, str(tmp_path / "new"), str(told)]) as process:
        while not told.exists():
            assert process.poll() is None
            time.sleep(0.001)
        forked = psutil.Process(int(told.read_text()))
        process.kill()
    try:
        assert gone_within([forked], 30) == []
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            forked.kill()

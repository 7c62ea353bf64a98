"""Whoever holds a lifeline takes the process that is tied to it along, whatever that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from unisono.runtime.workers.lifeline import Lifeline, die_with

WITHIN_S = 30.0  # on a machine where others compute, too


@pytest.fixture
def tied() -> Iterator[tuple[Lifeline, subprocess.Popen[bytes]]]:
    lifeline = Lifeline()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import signal; print(flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
        pass_fds=[lifeline.theirs.fileno()],
    )
    with process:
        lifeline.tie(process.pid)
        assert process.stdout is not None
        process.stdout.readline()
        assert process.poll() is None
        yield lifeline, process
        lifeline.close()
        process.kill()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_letting_go_kills_the_process_that_is_tied(tied, is_stopped):
    lifeline, process = tied
    if is_stopped:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    lifeline.close()
    assert process.wait(WITHIN_S) == -signal.SIGKILL


def test_a_fork_of_the_holder_does_not_hold_it(tied):
    lifeline, process = tied
    fork = os.fork()
    if fork == 0:
        signal.pause()
        os._exit(0)
    try:
        lifeline.close()
        assert process.wait(WITHIN_S) == -signal.SIGKILL
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_a_fork_that_was_stopped_before_it_asked_is_told_that_its_parent_is_gone():
    """No signal is sent any more: it leaves by itself as soon as it is continued."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            parent = os.getpid()
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                os.write(writing, b"there" if die_with(parent) else b"gone")
            else:
                os.waitid(os.P_PID, child, os.WSTOPPED)
                os.write(writing, b"%d " % child)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(parent, 0)
    with os.fdopen(reading, "rb") as pipe:
        child, _, said = pipe.read1(64).partition(b" ")
        assert said == b""  # it is still stopped
        os.kill(int(child), signal.SIGCONT)
        assert pipe.read() == b"gone"

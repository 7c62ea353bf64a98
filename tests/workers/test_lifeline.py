"""Whoever must not outlive its parent knows when it is too late to ask for that."""

from __future__ import annotations

import os
import signal

from unisono.runtime.workers.lifeline import die_with


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

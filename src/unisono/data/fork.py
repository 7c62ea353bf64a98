"""Try something in a fork of this process, so that its effects stay there.

Invariants: whatever fails here, in the work or in the system, the answer is merely empty. The work
uses no GPU, which a fork of a process that has used one cannot; nor does the fork free what belongs
to one.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import threading
import warnings
from collections.abc import Callable
from typing import NoReturn

from unisono.workers.lifeline import die_with

_SAID_AT_MOST_BYTES = 64 * 1024  # what a pipe holds


def said_by_fork(work: Callable[[], bytes], timeout_s: float) -> bytes:
    """Do something in a fork.

    Args:
        work: returns at most 64 KiB; what it prints is not shown. It uses no GPU.
        timeout_s: how long it may take, in seconds.

    Returns:
        What `work` returned; nothing if it raised or took too long, if the system has no process to
        give, or if this one has several threads, whose locks a fork might find taken.
    """
    if threading.active_count() > 1:
        return b""
    try:
        reading, writing = os.pipe()
    except OSError:
        return b""
    try:
        pid = _forked(work, writing)
        try:
            return _read(reading, timeout_s)
        finally:
            _end(pid)
    except OSError:
        return b""
    finally:
        os.close(reading)


def _forked(work: Callable[[], bytes], writing: int) -> int:
    """Let a process write what it says; the end of the pipe that it writes to is closed here."""
    parent_pid = os.getpid()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of the threads of numerical libraries, which compute with one here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _say_and_leave(work, writing, parent_pid)
        return pid
    finally:
        os.close(writing)


def _say_and_leave(work: Callable[[], bytes], writing: int, parent_pid: int) -> NoReturn:
    try:
        if die_with(parent_pid):
            gc.freeze()
            _be_first_to_go()
            silence = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(silence, fd)
            os.write(writing, work())
    finally:
        os._exit(0)


def _be_first_to_go() -> None:
    """Where memory is short, have the system kill this process, not one that trains."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _read(reading: int, timeout_s: float) -> bytes:
    # Unlike `select`, this takes every file descriptor.
    waiting = select.poll()
    waiting.register(reading, select.POLLIN)
    is_ready = waiting.poll(math.ceil(max(timeout_s, 0.0) * 1000))
    return os.read(reading, _SAID_AT_MOST_BYTES) if is_ready else b""


def _end(pid: int) -> None:
    """End a child that is still there; the program may have had it waited for."""
    with contextlib.suppress(OSError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

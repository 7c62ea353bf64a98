"""Something is tried in a fork of this process, so that all its effects stay there."""

from __future__ import annotations

import os
import select
import threading
import warnings
from collections.abc import Callable
from typing import NoReturn

from unisono.comm.lifeline import die_with

_SAID_AT_MOST_BYTES = 64 * 1024  # what a pipe holds


def said_by_fork(work: Callable[[], bytes], timeout_s: float) -> bytes:
    """Do something in a fork and hear what comes of it.

    Args:
        work: says at most 64 KiB; what it prints is not shown.
        timeout_s: how long it may take.

    Returns:
        What it said; nothing if it raised, took too long, or this process has several threads,
        whose locks a fork might find taken.
    """
    if threading.active_count() > 1:
        return b""
    parent_pid = os.getpid()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of the threads of numerical libraries, which compute with one here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _say_and_leave(work, writing, parent_pid)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], timeout_s)
        return os.read(reading, _SAID_AT_MOST_BYTES) if ready else b""
    finally:
        os.close(reading)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _say_and_leave(work: Callable[[], bytes], writing: int, parent_pid: int) -> NoReturn:
    try:
        if not die_with(parent_pid):
            os._exit(0)
        silence = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(silence, fd)
        os.write(writing, work())
    finally:
        os._exit(0)

"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> bool:
    """Have the kernel kill this process when its parent ends. Source: prctl(2).

    Args:
        parent_pid: the process that forked this one.

    Returns:
        Whether the parent is still there; if not, it was too late to ask.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid

"""Processes that must not outlive the one that has started them.

::

    launcher ── starts ──► server           killed when the thread that has started it ends
    server   ── forks ──► worker            killed when its parent ends
    worker   ── forks ──► loader process    the same

The kernel does it, with SIGKILL, so it also reaches a process that has been stopped, that computes
for ever or that has only begun to load.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int, signum: int = signal.SIGKILL) -> bool:
    """Have the kernel signal this process when its parent ends. Source: prctl(2).

    Its parent is the thread that forked, which in a launcher may end before the process does. A
    process that is stopped before it has asked leaves when continued.

    Returns:
        Whether the parent is still there; if not, it was too late to ask.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    return os.getppid() == parent_pid

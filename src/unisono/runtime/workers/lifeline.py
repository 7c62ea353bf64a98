"""Processes that must not outlive others: the one that forked them, or one that holds a lifeline.

::

    launcher ── holds one end ──► server    killed when nobody holds that end any more
    server   ── forks ──► worker            killed when its parent ends
    worker   ── forks ──► loader process    the same

The kernel does all of it, with SIGKILL, so it also reaches a process that has been stopped, that
computes for ever or that has only begun to load.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import weakref

from unisono.runtime.world import per_process

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int, signum: int = signal.SIGKILL) -> bool:
    """Have the kernel signal this process when its parent ends. Source: prctl(2).

    Its parent is the thread that forked, which in a launcher may end before the process does: there
    it takes a :class:`Lifeline`. A fork that is stopped before it has asked leaves when continued.

    Args:
        parent_pid: the process that forked this one.
        signum: with what.

    Returns:
        Whether the parent is still there; if not, it was too late to ask.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    return os.getppid() == parent_pid


class Lifeline:
    """What ties a process to this one, whoever of its threads has started it. Final.

    A pair of sockets over which nothing is sent. The other process inherits one end; when this one
    ends, however it does, the kernel closes the other end and sends the signal that it has been
    told to send when something happens there. Source: fcntl(2), F_SETSIG.

    Attributes:
        theirs: what the other process must inherit and keep open; its children must close it.
    """

    def __init__(self) -> None:
        self._held, self.theirs = socket.socketpair()
        per_process(_HeldEnds).ends.add(self._held)

    def tie(self, pid: int) -> None:
        """Have the kernel kill the process `pid`, which has inherited its end, with this one."""
        fd = self.theirs.fileno()
        # All three belong to what is open, not to the descriptor, so they hold for that process.
        with contextlib.suppress(OSError):  # it still sees the end of its channel by itself
            fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        self.theirs.close()

    def close(self) -> None:
        """Let go, which kills a process that is tied."""
        self._held.close()


class _HeldEnds:
    """The ends that a process holds: a fork of it must not hold them, too."""

    def __init__(self) -> None:
        self.ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._let_go)

    def _let_go(self) -> None:
        for end in list(self.ends):
            end.close()

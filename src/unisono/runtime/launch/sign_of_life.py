"""How do other hosts see that this launcher lives? It listens once its workers start again.

Their workers connect, and nobody sends anything: the connection ends with this process.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import final

from unisono.errors import RendezvousError
from unisono.runtime.launch.job import ADDRESS, Job, reserved_port
from unisono.runtime.workers.interfaces import address_here

_BACKLOG, _CALLERS_AT_MOST = 4096, 512


@final
class SignOfLife:
    """The port of one launcher. On one host nothing listens there, and it is MASTER_PORT."""

    def __init__(self, job: Job) -> None:
        self._listening = reserved_port(_address_of(job))
        self.port = int(self._listening.getsockname()[1])
        self._callers: list[socket.socket] = []
        self._is_shown = False

    def show(self, selector: selectors.BaseSelector) -> None:
        """Listen from now on, if there is a network."""
        if self.port and not self._is_shown:
            self._is_shown = True
            self._listening.listen(_BACKLOG)
            self._listening.setblocking(False)
            selector.register(self._listening, selectors.EVENT_READ, self._keep_caller)

    def close(self) -> None:
        """Close all connections."""
        for each in (self._listening, *self._callers):
            each.close()

    def _keep_caller(self) -> None:
        for caller in list(self._callers):
            with contextlib.suppress(BlockingIOError):  # it is still there
                with contextlib.suppress(ConnectionError):
                    caller.recv(64)
                self._callers.remove(caller)
                caller.close()
        with contextlib.suppress(OSError):  # it has left already
            caller, _ = self._listening.accept()
            caller.setblocking(False)
            self._callers.append(caller)
        if len(self._callers) > _CALLERS_AT_MOST:
            self._callers.pop(0).close()


def _address_of(job: Job) -> str:
    """Return the address at which other hosts reach this launcher, if there are other hosts."""
    try:
        return address_here(job.environ) if job.hosts else ADDRESS
    except RendezvousError:  # workers raise it
        return ADDRESS

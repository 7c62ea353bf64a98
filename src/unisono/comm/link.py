"""What holds a worker to its launcher? A channel for words and a control page for signs.

The launcher puts both descriptors into the environment (``UNISONO_LINK``, ``UNISONO_CONTROL``)
together with the process it means (``UNISONO_PID``). Invariant: only that very process has a
link; what it forks or starts, such as a loader process, has none.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from unisono.comm.channel import Channel, Message
from unisono.comm.control import ControlPage
from unisono.errors import MismatchError, UnisonoError
from unisono.world import World, world

LINK_VARIABLE = "UNISONO_LINK"
CONTROL_VARIABLE = "UNISONO_CONTROL"
PID_VARIABLE = "UNISONO_PID"


def is_worker(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether this very process was started by a launcher as one of its workers."""
    environ = os.environ if environ is None else environ
    return environ.get(PID_VARIABLE) == str(os.getpid())


class Link:
    """A worker's end. Final; found with :meth:`from_environment`.

    Attributes:
        world: this worker's place among the others.
        control: the page on which all workers of the job meet.
    """

    def __init__(self, channel: Channel, world: World, control: ControlPage) -> None:
        self.world = world
        self.control = control
        self._channel = channel
        self._lock = threading.Lock()
        self._num_memories = 0
        self._index_of_fd: dict[int, int] = {}
        self._unused: deque[int] = deque()

    @staticmethod
    def from_environment() -> Link | None:
        """Find this process's link, always the same object; None without a launcher."""
        if not is_worker() or LINK_VARIABLE not in os.environ:
            return None
        return _open(int(os.environ[LINK_VARIABLE]), int(os.environ[CONTROL_VARIABLE]), os.getpid())

    def memory(self, num_bytes: int) -> int:
        """Get the descriptor of memory that all workers share and the launcher keeps alive.

        Collective: the k-th call on every worker gives the same memory, zero at first.

        Raises:
            MismatchError: another worker asked for another size.
        """
        with self._lock:
            while self._unused:
                self._release(self._unused.popleft())
            index = self._num_memories
            self._num_memories += 1
            request = {"type": "memory", "index": index, "num_bytes": num_bytes}
            answer = self._ask(request)
            if answer.header["type"] == "refused":
                raise MismatchError(answer.header["reason"])
            self._index_of_fd[answer.fds[0]] = index
            return answer.fds[0]

    def release(self, fd: int) -> None:
        """Give back a descriptor that :meth:`memory` gave; mappings of it stay valid.

        When all workers have released it, the launcher lets go of the memory too. It happens at
        the next :meth:`memory`, so that a finalizer may call this at any moment.
        """
        self._unused.append(fd)

    def tell(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send one message to the launcher that needs no answer, such as a result or a failure."""
        with self._lock:
            self._channel.send(header, payload)

    def _release(self, fd: int) -> None:
        index = self._index_of_fd.pop(fd)
        os.close(fd)
        self._channel.send({"type": "release", "index": index})

    def _ask(self, request: dict[str, Any]) -> Message:
        try:
            self._channel.send(request)
            answer = self._channel.receive()
        except ConnectionError as error:
            raise _launcher_is_gone() from error
        if answer is None:
            raise _launcher_is_gone()
        return answer


def _launcher_is_gone() -> UnisonoError:
    return UnisonoError(
        "a worker's launcher must outlive it, but the connection to it is closed: "
        "the launcher was killed, or this script closed descriptors that it does not own."
    )


@functools.cache
def _open(link_fd: int, control_fd: int, pid: int) -> Link:
    # `pid` is part of the key: a forked process inherits the cache but must not use its link.
    here = world()
    os.set_inheritable(control_fd, False)
    control = ControlPage.attach(control_fd, here.world_size)
    return Link(Channel.from_fd(link_fd), here, control)

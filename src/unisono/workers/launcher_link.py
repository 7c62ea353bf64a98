"""What holds a worker to its launcher? A channel for messages, the control block, and a store.

The launcher puts their descriptors into the environment (``UNISONO_LINK``, ``UNISONO_CONTROL``,
``UNISONO_STORE``) together with the process it means (``UNISONO_PID``), how many workers had its
rank before it (``UNISONO_INCARNATION``), and whether lost workers are replaced
(``UNISONO_RECOVERS``).
Invariant: only that very process has a link; what it forks or starts, such as a loader process,
has none.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from unisono.errors import CheckpointError, MismatchError, UnisonoError
from unisono.workers import launcher_messages as messages
from unisono.workers.channel import Channel
from unisono.workers.control_block import ControlBlock
from unisono.workers.job_store import file_store
from unisono.workers.membership import Membership
from unisono.workers.memory import Memory
from unisono.workers.supervisor import Gather, Supervisor
from unisono.world import world

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LINK_VARIABLE = "UNISONO_LINK"
CONTROL_VARIABLE = "UNISONO_CONTROL"
STORE_VARIABLE = "UNISONO_STORE"
PID_VARIABLE = "UNISONO_PID"
INCARNATION_VARIABLE = "UNISONO_INCARNATION"
RECOVERS_VARIABLE = "UNISONO_RECOVERS"
COMMAND_VARIABLE = "UNISONO_COMMAND"  # what the user has called, for reports

Answer = TypeVar("Answer", bound=messages.ToWorker)


def is_worker() -> bool:
    """Tell whether this very process was started, or has come, as a worker."""
    return os.environ.get(PID_VARIABLE) == str(os.getpid())


def has_launcher() -> bool:
    """Tell whether this very process was started by our launcher as one of its workers."""
    return is_worker() and LINK_VARIABLE in os.environ


class LauncherLink(Supervisor):
    """The end of a worker that our launcher has started; a process has one.

    It takes over the descriptors that the environment names.
    """

    explains_waits = True

    def __init__(self) -> None:
        self.world = world()
        control_fd = int(os.environ[CONTROL_VARIABLE])
        os.set_inheritable(control_fd, False)
        self.control = self._map(control_fd)
        self.store_fd = int(os.environ[STORE_VARIABLE])
        os.set_inheritable(self.store_fd, False)
        self.incarnation = int(os.environ.get(INCARNATION_VARIABLE, "0"))
        self.can_replace = os.environ.get(RECOVERS_VARIABLE) == "1"
        self._channel = Channel.from_fd(int(os.environ[LINK_VARIABLE]))
        self._lock = threading.RLock()
        self._unused: deque[int] = deque()  # keys

    def _map(self, fd: int) -> ControlBlock:
        return ControlBlock(fd, self.world.world_size)

    def open_store(self) -> Store:
        """Open the store that all workers of the job reach."""
        return file_store(self.store_fd)

    def connect(self) -> None:
        """Reach the workers of other hosts: there are none."""

    def tell(self, message: messages.Told) -> None:
        """Send a message that needs no answer."""
        with self._lock:
            self._channel.send(message)

    def show_wait(self, what: str) -> None:
        """Show the launcher what this process waits for; in at most 124 letters."""
        if what:
            self.control.begin_wait(self.world.rank, what.encode())
        else:
            self.control.end_wait(self.world.rank)

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Share memory that the launcher makes and keeps alive.

        Raises:
            MismatchError: another worker asked for another size.
        """
        with self._lock:
            while self._unused:
                self._channel.send(messages.MemoryReleased(self._unused.popleft()))
            memory = super().memory(key, num_bytes, gather)
        # Not sent by the finalizer, which may run at any moment, but with the next request.
        weakref.finalize(memory, self._unused.append, key).atexit = False
        return memory

    def memory_fd(self, key: int, num_bytes: int, gather: Gather, path: str = "") -> int:
        """See :meth:`Supervisor.memory_fd`; the launcher takes it that this worker keeps it."""
        request = messages.MemoryRequest(key, num_bytes, path)
        return self._ask(request, messages.MemoryGranted).fds[0]

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """See :meth:`Supervisor.stopped`; the launcher decides when all others have stopped."""
        return self._ask(messages.Stopped(arrivals, between_steps), messages.Continue).membership

    def catch_up(self, index: int, name: str) -> messages.Passed | messages.Live:
        """See :meth:`Supervisor.catch_up`; the launcher knows the outcomes.

        Raises:
            MismatchError: the others have made other calls, or the replacement cannot join them.
        """
        answer = self._ask(messages.CatchUp(index, name), messages.Passed, messages.Live)
        return cast("messages.Passed | messages.Live", answer)

    def write_checkpoint(self, slot: Mapping[str, Any], *, wait: bool) -> bool:
        """See :meth:`Supervisor.write_checkpoint`; the launcher writes it."""
        self._ask(messages.WriteRequest(slot, wait), messages.Acknowledged)
        return True

    def lock_directory(self, directory: str) -> bool:
        """See :meth:`Supervisor.lock_directory`; the launcher holds the lock."""
        self._ask(messages.LockRequest(directory), messages.Acknowledged)
        return True

    def _ask(self, request: messages.Request, *kinds: type[Answer]) -> Answer:
        """Send a request and wait for an answer of one of these kinds, or raise its refusal."""
        try:
            with self._lock:
                self._channel.send(request)
                self._await_answer()
                answer = self._channel.receive()
        except ConnectionError as error:
            raise _launcher_is_gone() from error
        if answer is None:
            raise _launcher_is_gone()
        if isinstance(answer, messages.Refused):
            if answer.is_of_system:
                raise OSError(answer.reason)
            raise (CheckpointError if answer.is_of_checkpoint else MismatchError)(answer.reason)
        if not isinstance(answer, kinds):
            raise UnisonoError(
                f"the answer to {request} must be {' or '.join(k.__name__ for k in kinds)}, but is "
                f"{type(answer).__name__}: launcher and workers must be of the same version."
            )
        return answer

    def _await_answer(self) -> None:
        """Look at something else while an answer has not come; here there is nothing."""


def _launcher_is_gone() -> UnisonoError:
    return UnisonoError(
        "a worker's launcher must outlive it, but the connection to it is closed: "
        "the launcher was killed, or this script closed descriptors that it does not own."
    )

"""Who started this worker, and what does that one do for it?

========================  ===================  ====================  ==============================
started by                implementation       shared memory         a lost worker
========================  ===================  ====================  ==============================
our launcher              LauncherLink         the launcher's        is replaced, or the others
                                                                     continue without it
another one (torchrun …)  ExternallyLaunched   made by rank 0        is named in an error
nobody                    SingleProcess        private               —
========================  ===================  ====================  ==============================

Our launcher puts the descriptors of a channel, the control block and a store into the environment,
together with the process it means: what that forks or starts has no link.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, final

from unisono.errors import UnisonoError
from unisono.runtime.procfs import create_memory
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.job_store import file_store
from unisono.runtime.workers.launcher_messages import Channel, Live, Membership, Passed, Told
from unisono.runtime.workers.memory import Memory
from unisono.runtime.world import World, world

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from unisono.runtime.checkpoint.writer import Kept


# Sends everyone a message, for a purpose, and returns everyone's by rank. Collective.
Gather = Callable[[bytes, str], dict[int, bytes]]


class Supervisor(Protocol):
    """Whoever started this worker. What is written out here holds where nobody supervises it."""

    world: World  # this worker's place
    control: ControlBlock  # the control block on which all workers meet
    incarnation: int = 0  # how many workers had this rank before
    can_replace: bool = False  # whether lost workers are replaced, so that snapshots are of use
    # whether nobody started this process as one of several workers, be it of one
    is_alone: bool = False
    # whether a signal that is to end the job reaches workers, as no launcher of ours has taken it
    hears_signals: bool = False
    explains_waits: bool = False  # whether the launcher reports long waits
    # the ranks of each of several hosts; empty: all are on this one
    ranks_of_host: tuple[tuple[int, ...], ...] = ()
    address: str = ""  # where other hosts reach this one, if there are any
    # whether all can begin again what they do just now, where that is how a lost worker is made
    # up for
    can_go_back: bool = True
    # tells the number of the newest that is known to be whole; None: there are none
    newest_snapshot: Callable[[], int] | None = None
    agreed_snapshot: int = 0  # the number of that to which all go back
    # the facts of the loop in which all do so; None: they begin it again, or are in none
    agreed_loop: Mapping[str, Any] | None = None

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Share memory with every worker that asks with the same `key`; zero at first.

        Collective if the workers make it themselves, by `gather`.
        """
        fd = self.memory_fd(key, num_bytes, gather)
        try:
            return Memory.map(fd, num_bytes)
        finally:
            os.close(fd)

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """Do the same, and give the descriptor of that memory, which is the caller's."""

    def tell(self, message: Told) -> None:
        """Tell something that needs no answer; nobody listens."""
        return

    def look(self) -> None:
        """Mark on the control block which workers have died, if nobody else does."""
        return

    def show_wait(self, what: str) -> None:
        """Show what this process waits for elsewhere than at a meeting; empty: it continues."""
        return

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Stand still after some meetings until it is decided who continues: everyone does."""
        return Membership.of(self.world.world_size)

    def outcome(self, index: int, name: str) -> bytes | None:
        """Return the outcome of the `index`-th replicated call if others have it already."""
        return None

    def catch_up(self, index: int, name: str) -> Passed | Live:
        """Ask, as a replacement, for the outcome of the `index`-th replicated call."""
        return Live(Membership.of(self.world.world_size), None, is_alone=self.is_alone)

    def write_checkpoint(self, kept: Kept, *, wait: bool) -> bool:
        """Have a snapshot written as a checkpoint after earlier ones; False if this process has to.

        `wait`: until it is on the disk, or has failed.
        """
        return False

    def lock_directory(self, directory: str, remote: Mapping[str, Any] | None = None) -> bool:
        """Keep other jobs out of a run directory; False if this process has to do it itself."""
        return False


@final
class SingleProcess(Supervisor):
    """A process that nobody started as a worker: nobody supervises it."""

    is_alone = hears_signals = True

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.control = ControlBlock(-1, 1)

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """Take memory that this process shares with nobody but its forks."""
        return create_memory("unisono-memory", num_bytes)


LINK_VARIABLE = "UNISONO_LINK"
CONTROL_VARIABLE = "UNISONO_CONTROL"
STORE_VARIABLE = "UNISONO_STORE"
PID_VARIABLE = "UNISONO_PID"
INCARNATION_VARIABLE = "UNISONO_INCARNATION"
RECOVERS_VARIABLE = "UNISONO_RECOVERS"
COMMAND_VARIABLE = "UNISONO_COMMAND"  # what the user has called, for reports

Answer = TypeVar("Answer", bound=messages.ToWorker)


def is_worker() -> bool:
    """Return whether this very process was started, or has come, as a worker."""
    return os.environ.get(PID_VARIABLE) == str(os.getpid())


def has_launcher() -> bool:
    """Return whether this very process was started by our launcher as one of its workers."""
    return is_worker() and LINK_VARIABLE in os.environ


class LauncherLink(Supervisor):
    """The end of a worker that our launcher has started; a process has one."""

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
        self.control.show_wait(self.world.rank, what.encode())

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Share memory that the launcher makes and keeps alive."""
        with self._lock:
            while self._unused:
                self._channel.send(messages.MemoryReleased(self._unused.popleft()))
            memory = super().memory(key, num_bytes, gather)
        # Not sent by the finalizer, which may run at any moment, but with the next request.
        weakref.finalize(memory, self._unused.append, key).atexit = False
        return memory

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """See :meth:`Supervisor.memory_fd`; the launcher takes it that this worker keeps it."""
        request = messages.MemoryRequest(key, num_bytes)
        return self._ask(request, messages.MemoryGranted).fds[0]

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """See :meth:`Supervisor.stopped`; the launcher decides when all others have stopped."""
        return self._ask(messages.Stopped(arrivals, between_steps), messages.Continue).membership

    def catch_up(self, index: int, name: str) -> messages.Passed | messages.Live:
        """See :meth:`Supervisor.catch_up`; the launcher knows the outcomes."""
        answer = self._ask(messages.CatchUp(index, name), messages.Passed, messages.Live)
        return cast("messages.Passed | messages.Live", answer)

    def write_checkpoint(self, kept: Kept, *, wait: bool) -> bool:
        """See :meth:`Supervisor.write_checkpoint`; the launcher writes it."""
        self._ask(messages.WriteRequest(kept, wait), messages.Acknowledged)
        return True

    def lock_directory(self, directory: str, remote: Mapping[str, Any] | None = None) -> bool:
        """See :meth:`Supervisor.lock_directory`; the launcher holds the lock."""
        self._ask(messages.LockRequest(directory, remote), messages.Acknowledged)
        return True

    def _ask(self, request: messages.Request, *kinds: type[Answer]) -> Answer:
        """Send a request and wait for an answer of one of these kinds, or raise its refusal."""
        answer = None
        with self._lock, suppress(ConnectionError):
            self._channel.send(request)
            self._await_answer()
            answer = self._channel.receive()
        if answer is None:
            raise UnisonoError(
                "a worker's launcher must outlive it, but the connection to it is closed: the "
                "launcher was killed, or this script closed descriptors that it does not own."
            )
        if isinstance(answer, messages.Refused):
            raise answer.error(answer.reason)
        assert isinstance(answer, kinds), f"{answer} is no answer to {request}"
        return answer

    def _await_answer(self) -> None:
        """Look at something else while an answer has not come; here there is nothing."""

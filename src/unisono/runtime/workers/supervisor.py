"""Who started this worker, and what does it do for the worker?

========================  ===================  ====================  ==============================
started by                implementation       shared memory         a lost worker
========================  ===================  ====================  ==============================
our launcher              LauncherLink         the launcher's        is replaced, or the others
                                                                     continue without it
another one (torchrun …)  ExternallyLaunched   made by rank 0        is named in an error
nobody                    SingleProcess        private               —
========================  ===================  ====================  ==============================

Our launcher passes the descriptors of a channel, the control block and a store in the environment,
together with the worker's PID: processes that the worker forks or starts have no link.
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
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.job_store import file_store
from unisono.runtime.workers.launcher_messages import Live, Passed
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.memory import Memory
from unisono.runtime.world import World, world

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from unisono.runtime.checkpoint.writer import SlotToWrite


# Sends everyone a message, for a purpose, and returns everyone's by rank. Collective.
Gather = Callable[[bytes, str], dict[int, bytes]]


class Supervisor(Protocol):
    """What started this worker. The default methods are for a process without a supervisor."""

    world: World  # this worker's place
    control: ControlBlock  # the control block on which all workers meet
    incarnation: int = 0  # how many workers with this rank were lost before
    is_replacement: bool = False  # whether this worker catches up with what was done before it
    can_replace: bool = False  # whether lost workers are replaced, so that snapshots are needed
    # whether this process was not started as a worker, not even as the only one
    is_alone: bool = False
    # whether workers receive the signals that end the job, as no launcher of ours handles them
    hears_signals: bool = False
    explains_waits: bool = False  # whether the launcher reports long waits
    # the ranks of each of several hosts; empty: all are on this one
    ranks_of_host: tuple[tuple[int, ...], ...] = ()
    address: str = ""  # where other hosts reach this one, if there are other hosts

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Share memory with every worker that requests the same `key`; initially zero.

        Collective if the workers create it themselves, using `gather`.
        """
        fd = self.memory_fd(key, num_bytes, gather)
        try:
            return Memory.map(fd, num_bytes)
        finally:
            os.close(fd)

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """Do the same as :meth:`memory`, but return the descriptor, which the caller owns."""

    def notify(self, message: messages.Notification) -> None:
        """Send a message that needs no answer; ignored here."""
        return

    def poll(self) -> None:
        """Mark dead workers on the control block, if no other process does."""
        return

    def show_wait(self, what: str) -> None:
        """Report what this process waits for outside of a barrier; empty when the wait is over."""
        return

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Stop after some barriers until it is decided who continues; here all do."""
        return Membership.of(self.world.world_size)

    def catch_up(self, index: int, name: str) -> Passed | Live:
        """Request the outcome of the `index`-th replicated call, as a replacement."""
        return Live(Membership.of(self.world.world_size), None, is_alone=self.is_alone)

    def write_checkpoint(self, kept: SlotToWrite, *, wait: bool) -> bool:
        """Request that a snapshot be written as a checkpoint; return False if the caller must.

        Checkpoints are written in order. `wait`: return once it is on the disk, or has failed.
        """
        return False

    def lock_directory(self, directory: str, remote: Mapping[str, Any] | None = None) -> bool:
        """Keep other jobs out of a run directory; return False if the caller must do so."""
        return False


@final
class SingleProcess(Supervisor):
    """The supervisor of a process that was not started as a worker."""

    is_alone = hears_signals = True

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.control = ControlBlock(-1, 1)

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """Allocate memory that this process shares only with its forks."""
        return create_memory("unisono-memory", num_bytes)


LINK_VARIABLE = "UNISONO_LINK"
CONTROL_VARIABLE = "UNISONO_CONTROL"
STORE_VARIABLE = "UNISONO_STORE"
PID_VARIABLE = "UNISONO_PID"
INCARNATION_VARIABLE = "UNISONO_INCARNATION"
RECOVERS_VARIABLE = "UNISONO_RECOVERS"
LAUNCHER_PORT_VARIABLE = "UNISONO_LAUNCHER_PORT"  # where it listens for other hosts
COMMAND_VARIABLE = "UNISONO_COMMAND"  # the user's command, for reports

Answer = TypeVar("Answer", bound=messages.ToWorker)


def is_worker() -> bool:
    """Return whether this process itself was started, or has joined, as a worker."""
    return os.environ.get(PID_VARIABLE) == str(os.getpid())


def has_launcher() -> bool:
    """Return whether our launcher started this process itself as a worker."""
    return is_worker() and LINK_VARIABLE in os.environ


class LauncherLink(Supervisor):
    """The link of a worker to our launcher; one per process."""

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
        self.is_replacement = self.can_replace and self.incarnation > 0
        self._channel = Channel.from_fd(int(os.environ[LINK_VARIABLE]))
        self._lock = threading.RLock()
        self._unused: deque[int] = deque()  # keys

    def _map(self, fd: int) -> ControlBlock:
        return ControlBlock(fd, self.world.world_size)

    def open_store(self) -> Store:
        """Open the store that all workers of the job reach."""
        return file_store(self.store_fd)

    def connect(self) -> None:
        """Connect to the workers of other hosts; here there are none."""

    def notify(self, message: messages.Notification) -> None:
        """Send a message that needs no answer."""
        with self._lock:
            self._channel.send(message)

    def show_wait(self, what: str) -> None:
        """Report what this process waits for to the launcher, in at most 124 bytes."""
        self.control.show_wait(self.world.rank, what.encode())

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Share memory that the launcher creates and keeps alive."""
        with self._lock:
            while self._unused:
                self._channel.send(messages.MemoryReleased(self._unused.popleft()))
            memory = super().memory(key, num_bytes, gather)
        # Not sent by the finalizer, which may run at any moment, but with the next request.
        weakref.finalize(memory, self._unused.append, key).atexit = False
        return memory

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """Request memory from the launcher, which assumes that this worker keeps it."""
        request = messages.MemoryRequest(key, num_bytes)
        return self._ask(request, messages.MemoryGranted).fds[0]

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Stop until the launcher decides who continues, once all others have stopped."""
        return self._ask(messages.Stopped(arrivals, between_steps), messages.Continue).membership

    def catch_up(self, index: int, name: str) -> messages.Passed | messages.Live:
        """Request the outcome of a replicated call from the launcher."""
        answer = self._ask(messages.CatchUp(index, name), messages.Passed, messages.Live)
        return cast("messages.Passed | messages.Live", answer)

    def write_checkpoint(self, kept: SlotToWrite, *, wait: bool) -> bool:
        """Request that the launcher write a snapshot as a checkpoint."""
        self._ask(messages.WriteRequest(kept, wait), messages.Acknowledged)
        return True

    def lock_directory(self, directory: str, remote: Mapping[str, Any] | None = None) -> bool:
        """Request that the launcher lock a run directory."""
        self._ask(messages.LockRequest(directory, remote), messages.Acknowledged)
        return True

    def _ask(self, request: messages.Request, *kinds: type[Answer]) -> Answer:
        """Send a request and wait for an answer of one of these kinds, or raise its refusal."""
        answer = None
        with self._lock, suppress(ConnectionError):
            self._channel.send(request)
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

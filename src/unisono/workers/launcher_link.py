"""What holds a worker to its launcher? A channel for words and a control control block for signs.

The launcher puts both descriptors into the environment (``UNISONO_LINK``, ``UNISONO_CONTROL``)
together with the process it means (``UNISONO_PID``), how many workers had its rank before it
(``UNISONO_INCARNATION``), and whether lost workers are made up for (``UNISONO_RECOVERS``).
Invariant: only that very process has a link; what it forks or starts, such as a loader process,
has none.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    MismatchError,
    PeerLostError,
    RendezvousError,
    UnisonoError,
    WaitTimeoutError,
)
from unisono.workers.channel import Channel, Message
from unisono.workers.control_block import ControlBlock
from unisono.workers.membership import Membership
from unisono.workers.supervisor import Live, Passed
from unisono.world import World, world

if TYPE_CHECKING:
    # Loads torch, which the launcher, who has this module too, must not wait for.
    from unisono.workers.memory import Memory

LINK_VARIABLE = "UNISONO_LINK"
CONTROL_VARIABLE = "UNISONO_CONTROL"
PID_VARIABLE = "UNISONO_PID"
INCARNATION_VARIABLE = "UNISONO_INCARNATION"
RECOVERS_VARIABLE = "UNISONO_RECOVERS"
# What the user has called, for reports.
COMMAND_VARIABLE = "UNISONO_COMMAND"


@dataclass(frozen=True, slots=True)
class Gathered:
    """All ranks of a process group have come.

    Attributes:
        prefix: what the group's keys in its store begin with; no other group's do.
        port: where on loopback the launcher's store is; 0 if it was not asked for.
    """

    prefix: str
    port: int


def is_worker(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether this very process was started by a launcher as one of its workers."""
    environ = os.environ if environ is None else environ
    return environ.get(PID_VARIABLE) == str(os.getpid())


class LauncherLink:
    """A worker's end of the connection; implements :class:`~.supervisor.Supervisor`. Final.

    Made by :meth:`from_environment`.

    Attributes:
        world: this worker's place among the others.
        control: the control block on which all workers of the job meet.
        incarnation: how many workers had this rank before; above 0 for a replacement.
        can_replace: see :class:`unisono.workers.supervisor.Supervisor`.
    """

    def __init__(
        self,
        channel: Channel,
        world: World,
        control: ControlBlock,
        *,
        incarnation: int = 0,
        can_replace: bool = False,
    ) -> None:
        self.world = world
        self.control = control
        self.incarnation = incarnation
        self.can_replace = can_replace
        self._channel = channel
        self._lock = threading.Lock()
        self._key_of_fd: dict[int, int] = {}
        self._unused: deque[int] = deque()

    @staticmethod
    def from_environment() -> LauncherLink | None:
        """Find this process's link, always the same object; None without a launcher."""
        if not is_worker() or LINK_VARIABLE not in os.environ:
            return None
        return _open(int(os.environ[LINK_VARIABLE]), int(os.environ[CONTROL_VARIABLE]), os.getpid())

    def note_ready(self) -> None:
        """See :meth:`unisono.workers.supervisor.Supervisor.note_ready`."""
        self.tell({"type": "ready"})

    def memory(self, key: int, num_bytes: int) -> Memory:
        """See :meth:`unisono.workers.supervisor.Supervisor.memory`; the launcher keeps it alive.

        Raises:
            MismatchError: another worker asked for another size.
        """
        from unisono.workers.memory import Memory

        with self._lock:
            while self._unused:
                self._release(self._unused.popleft())
            answer = self._ask({"type": "memory", "key": key, "num_bytes": num_bytes})
            if answer.header["type"] == "refused":
                raise MismatchError(answer.header["reason"])
            fd = answer.fds[0]
            self._key_of_fd[fd] = key
        memory = Memory.map(fd, num_bytes)
        # Not sent by the finalizer, which may run at any moment, but with the next request.
        weakref.finalize(memory, self._unused.append, fd).atexit = False
        return memory

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """See :meth:`unisono.workers.supervisor.Supervisor.stopped`."""
        with self._lock:
            request = {"type": "stopped", "arrivals": arrivals, "between_steps": between_steps}
            return Membership.from_json(self._ask(request).header["membership"])

    def entry(self, index: int, name: str) -> Passed | Live:
        """See :meth:`unisono.workers.supervisor.Supervisor.entry`."""
        with self._lock:
            answer = self._ask({"type": "entry", "index": index, "name": name})
        header = answer.header
        if header["type"] == "passed":
            return Passed(answer.payload, header["loop"])
        if header["type"] == "refused":
            raise MismatchError(header["reason"])
        membership = Membership.from_json(header["membership"])
        return Live(membership, header["loop"], header["is_alone"])

    def note_result(self, index: int, name: str, payload: bytes) -> None:
        """See :meth:`unisono.workers.supervisor.Supervisor.note_result`."""
        self.tell({"type": "result", "index": index, "name": name}, payload)

    def note_loop(self, index: int, facts: dict[str, Any]) -> None:
        """See :meth:`unisono.workers.supervisor.Supervisor.note_loop`."""
        self.tell({"type": "loop", "index": index, "facts": facts})

    def note_end_of_loop(self, index: int, payload: bytes) -> None:
        """See :meth:`unisono.workers.supervisor.Supervisor.note_end_of_loop`."""
        self.tell({"type": "end of loop", "index": index}, payload)

    def give_up_recovery(self, reason: str) -> None:
        """See :meth:`unisono.workers.supervisor.Supervisor.give_up_recovery`."""
        self.tell({"type": "no recovery", "reason": reason})

    def remove_at_end(self, path: Path) -> None:
        """See :meth:`unisono.workers.supervisor.Supervisor.remove_at_end`."""
        self.tell({"type": "remove at end", "path": str(path)})

    def leave(self, path: Path) -> None:
        """See :meth:`unisono.workers.supervisor.Supervisor.leave`."""
        self.tell({"type": "leave", "path": str(path)})

    def keep(self, slot: dict[str, Any], *, wait: bool) -> None:
        """Have the launcher write a snapshot as a checkpoint, once an earlier one is written.

        Args:
            slot: where it lies and where it goes, as :class:`unisono.checkpoint.writer.Kept`.
            wait: return only when it is on the disk, or has failed.
        """
        with self._lock:
            self._ask({"type": "keep", "slot": slot, "wait": wait})

    def lock_directory(self, directory: str) -> str:
        """Have the launcher keep other jobs out of a run directory.

        Returns:
            Why it cannot; empty when it can.
        """
        with self._lock:
            reason: str = self._ask({"type": "lock", "directory": directory}).header["reason"]
        return reason

    def gather(
        self, place: str, rank: int, world_size: int, timeout_s: float, *, needs_store: bool
    ) -> Gathered:
        """Wait until all ranks of a process group have come. Collective: every rank calls it.

        Args:
            place: where they meet, in words; whoever names another one waits for others.
            rank: which rank of the group this worker is to be.
            world_size: how many there are to be.
            timeout_s: how long to wait, in seconds.
            needs_store: whether they need the launcher's store.

        Raises:
            PeerLostError: a worker has ended, so that not all can come.
            WaitTimeoutError: not all came in time.
            MismatchError: they do not agree on what they come to.
            RendezvousError: there is no store.
        """
        request = {
            "type": "gather",
            "place": place,
            "rank": rank,
            "world_size": world_size,
            "timeout_s": timeout_s,
            "needs_store": needs_store,
        }
        with self._lock:
            answer = self._ask(request).header
        if answer["type"] == "refused":
            raise _refusal(answer)
        return Gathered(answer["prefix"], answer["port"])

    def tell(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send one message to the launcher that needs no answer, such as a result or a failure."""
        with self._lock:
            self._channel.send(header, payload)

    def _release(self, fd: int) -> None:
        key = self._key_of_fd.pop(fd)
        os.close(fd)
        self._channel.send({"type": "release", "key": key})

    def _ask(self, request: dict[str, Any]) -> Message:
        try:
            self._channel.send(request)
            answer = self._channel.receive()
        except ConnectionError as error:
            raise _launcher_is_gone() from error
        if answer is None:
            raise _launcher_is_gone()
        return answer


def _refusal(answer: Mapping[str, Any]) -> UnisonoError:
    """Say why the ranks of a process group cannot come together."""
    reason = answer["reason"]
    match answer["why"]:
        case "lost":
            return PeerLostError(reason, rank=answer["lost"])
        case "late":
            missing = tuple(answer["missing"])
            return WaitTimeoutError(reason, missing=missing, waited_s=answer["waited_s"])
        case "mismatch":
            return MismatchError(reason)
    return RendezvousError(reason)


def _launcher_is_gone() -> UnisonoError:
    return UnisonoError(
        "a worker's launcher must outlive it, but the connection to it is closed: "
        "the launcher was killed, or this script closed descriptors that it does not own."
    )


@functools.cache
def _open(link_fd: int, control_fd: int, pid: int) -> LauncherLink:
    # `pid` is part of the key: a forked process inherits the cache but must not use its link.
    here = world()
    os.set_inheritable(control_fd, False)
    control = ControlBlock.attach(control_fd, here.world_size)
    return LauncherLink(
        Channel.from_fd(link_fd),
        here,
        control,
        incarnation=int(os.environ.get(INCARNATION_VARIABLE, "0")),
        can_replace=os.environ.get(RECOVERS_VARIABLE) == "1",
    )

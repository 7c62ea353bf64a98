"""Which messages do launcher, fork server and workers exchange? All kinds, typed.

    worker ──► launcher    FromWorker        launcher ──► server    ToServer
    worker ◄── launcher    ToWorker          launcher ◄── server    FromServer

A message is a frozen dataclass of plain values. It is pickled and sent over a pair of AF_UNIX
sockets, with the descriptors in `fds` attached (SCM_RIGHTS); the receiver owns them. The sockets
are of the kind SOCK_SEQPACKET, which preserves message boundaries. A message that is too long for a
packet lies in a memfd: the packet is a marker, and the memfd's descriptor is the last one.

Only processes of one job have an end of such a pair.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, dataclass_transform

from unisono.errors import MismatchError

if TYPE_CHECKING:
    from unisono.runtime.checkpoint.writer import SlotToWrite

# The name of a loop as a replicated call.
LOOP = "loop"
# The wait that a worker reports while ranks of a process group are missing.
IN_INIT = "init_process_group"
# The first key of memory that holds a dataset, for the whole job; loops have lower keys.
DATA_KEYS = 1 << 62
# The first key of predictions, which are stored in an unnamed file.
ROW_KEYS = DATA_KEYS + (1 << 61)


@dataclass_transform(frozen_default=True)
class Message:
    """Base of all messages. Each kind of message is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class FromWorker(Message):
    """A message from a worker to its launcher."""


class Notification(FromWorker):
    """A message from a worker to its launcher that needs no answer."""


class Request(FromWorker):
    """A request of a worker to its launcher; the worker waits for the answer."""


class ToWorker(Message):
    """An answer of the launcher."""


class ToServer(Message):
    """A message from the launcher to its fork server."""


class FromServer(Message):
    """A message from the fork server to its launcher."""


class Begun(Notification):
    """The program begins; anything before can always be repeated."""


class Ready(Notification):
    """The program uses Unisono: it can be run again from its start to replace a worker."""


class MakesGroup(Notification):
    """The worker is about to make a process group with others."""


class NoRecovery(Notification):
    """From now on lost workers cannot be replaced, for this reason."""

    reason: str


class ReplicatedResult(Notification):
    """The outcome of the `index`-th replicated call, `name`; for a loop, where it ended."""

    index: int
    name: str
    payload: bytes  # empty for a loop that was left before its end


class LoopBegan(Notification):
    """The `index`-th replicated call is a loop that can be joined now; `facts` are for joiners."""

    index: int
    facts: Mapping[str, Any]


class MemoryReleased(Notification):
    """The worker no longer needs this memory."""

    key: int


class ShowProgress(Notification):
    """Draw the progress of the run: a :class:`unisono.runtime.launch.cell.DisplayState`."""

    state: Mapping[str, Any]


class ProgramDone(Notification):
    """The program has finished; `payload` is its pickled result."""

    payload: bytes


class ProgramFailed(Notification):
    """The program has raised an exception."""

    exit_code: int  # the process's own
    summary: str  # the exception on one line
    traceback: str  # what Python would print
    waited_for: int | None  # the worker whose end the exception is about, if any
    is_disconnect: bool  # whether the exception only reports a broken connection to another worker
    payload: bytes  # the pickled exception


class MemoryRequest(Request):
    """Share memory with every worker that requests the same key. Answer: MemoryGranted."""

    key: int
    num_bytes: int


class Stopped(Request):
    """The worker has stopped at or after its `arrivals`-th barrier. Answer: Continue."""

    arrivals: int
    between_steps: bool


class CatchUp(Request):
    """A replacement reaches the `index`-th replicated call, `name`. Answer: Passed or Live."""

    index: int
    name: str


class WriteRequest(Request):
    """Write a snapshot as a checkpoint once earlier ones are written. Answer: Acknowledged."""

    kept: SlotToWrite  # where it is stored and where to write it
    wait: bool  # answer only once it is on the disk, or has failed


class LockRequest(Request):
    """Keep other jobs out of a run directory. Answer: Acknowledged."""

    directory: str
    remote: Mapping[str, Any] | None  # for a URL: the configuration of the process that copies


class Acknowledged(ToWorker):
    """The request has been carried out."""


class MemoryGranted(ToWorker):
    """The memory's descriptor."""

    fds: tuple[int, ...]


class Continue(ToWorker):
    """All have stopped; these workers continue."""

    membership: Membership


class Passed(ToWorker):
    """A replicated call is over; the replacement takes its outcome."""

    payload: bytes  # the outcome
    loop: Mapping[str, Any] | None = None  # for a loop: its facts when it began


class Live(ToWorker):
    """A replacement has caught up and is now in the membership."""

    membership: Membership  # the workers, including this one
    loop: Mapping[str, Any] | None  # for a loop that has begun: its facts then
    is_alone: bool  # no other worker is there; shared memory may be inconsistent
    snapshot: int = 0  # the number of the loop's newest complete snapshot on this host


class Refused(ToWorker):
    """The request is rejected for this reason; the worker raises it as `error`."""

    reason: str
    error: type[Exception] = MismatchError


class ForkWorker(ToServer):
    """Fork a worker; it gets the descriptors that :func:`be_worker` names."""

    rank: int
    incarnation: int
    fds: tuple[int, ...]


class SignalWorkers(ToServer):
    """Send a signal to those of these workers that still run."""

    ranks: tuple[int, ...]
    signum: int


class Forked(FromServer):
    """A worker has been forked."""

    rank: int
    pid: int


class WorkerExited(FromServer):
    """A worker's process has ended."""

    rank: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers that compute together; they divide work by their positions in `ranks`."""

    ranks: tuple[int, ...]  # ascending, at least one
    leader: int  # the worker whose values are shared, and which keeps the clock
    generation: int = 0  # grows with every change
    # what happened to the workers of the previous membership that are missing, in words
    why: str = field(default="", compare=False)

    @classmethod
    def of(cls, world_size: int) -> Membership:
        """Return the initial membership, of all workers."""
        return cls(tuple(range(world_size)), leader=0)


_IN_MEMORY = b"memory"  # no pickle starts with this
# Fits into socket buffers of any system configuration.
_PACKET_BYTES = 1 << 15
_MAX_DESCRIPTORS = 33  # of a message, including that of its memory
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


class Channel:
    """One end of a socket pair. Not locked: only one thread may send or receive at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.at_end = False

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Create two connected ends, both close-on-exec."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over an inherited or received descriptor, and make it close-on-exec."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor, for selectors and for passing the end on."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message; blocks while the other side's buffer is full."""
        fds: tuple[int, ...] = getattr(message, "fds", ())
        packet = pickle.dumps(message)
        if len(packet) <= _PACKET_BYTES:
            self._send_packet(packet, fds)
            return
        with os.fdopen(os.memfd_create("unisono-message", os.MFD_CLOEXEC), "wb") as file:
            file.write(packet)
            file.flush()
            self._send_packet(_IN_MEMORY, (*fds, file.fileno()))

    def receive(self) -> Message | None:
        """Wait for one message; return None once the other end is closed."""
        return self._receive(0)

    def receive_ready(self) -> list[Message]:
        """Return the messages that have arrived; set ``at_end`` once the other end is closed."""
        messages = []
        while not self.at_end:
            try:
                message = self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if message is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _send_packet(self, packet: bytes, fds: tuple[int, ...]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([packet], rights)

    def _receive(self, flags: int) -> Message | None:
        try:
            # Not socket.recv_fds: Python 3.11 ignores its flags.
            data, ancillary, _, _ = self._socket.recvmsg(
                _PACKET_BYTES, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            # Raised once: the other end closed with messages unread. What it sent is there.
            return self._receive(flags)
        arrived = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                arrived.frombytes(content[: len(content) - len(content) % arrived.itemsize])
        if not data:
            self.at_end = True
            return None
        return _read(data, list(arrived))


def _read(packet: bytes, fds: list[int]) -> Message:
    if packet == _IN_MEMORY:
        with os.fdopen(fds.pop(), "rb", buffering=0) as file:
            file.seek(0)  # the offset is where the sender stopped writing
            packet = file.read()
    message: Any = pickle.loads(packet)
    whole: Message = replace(message, fds=tuple(fds)) if fds else message
    return whole

"""Which messages do launcher, fork server and workers exchange? All kinds, typed.

    worker ──► launcher    FromWorker        launcher ──► server    ToServer
    worker ◄── launcher    ToWorker          launcher ◄── server    FromServer

A message is a frozen dataclass of plain values; :class:`Channel` sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, dataclass_transform

from unisono.errors import MismatchError
from unisono.runtime.workers.membership import Membership

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

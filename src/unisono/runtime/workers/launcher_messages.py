"""What do launcher, fork server and workers say to each other? Every kind of message, typed.

    worker ──► launcher    FromWorker        launcher ──► server    ToServer
    worker ◄── launcher    ToWorker          launcher ◄── server    FromServer

A message is a frozen dataclass. It travels (``channel.py``) as a JSON object with
its kind. A `payload` travels beside it as it is, and so do the descriptors in `fds`; whoever
receives the message owns them.

How does a frozen dataclass travel between processes? As JSON, checked against its annotations.

Nothing is unpickled, nothing but the named class and those of its fields is ever made, and what
does not fit is refused with a sentence. Fields may be of plain types, tuples of one type, mappings
(any JSON object), other such dataclasses, and these or None.

Who computes together now? A frozen value that the launcher decides and every worker believes.

Ranks are seats: a worker that is lost leaves its seat empty until a replacement takes it. What is
divided among workers (shards, pieces) is divided by their position in the membership.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

# The name of a loop among what workers do together.
LOOP = "loop"
# What a worker waits in for the ranks of a process group, as it shows it.
IN_INIT = "init_process_group"
# The first key of memory that holds a data set; loops have lower ones.
DATA_KEYS = 1 << 62
# The first key of predictions, which lie in a file.
ROW_KEYS = DATA_KEYS + (1 << 61)


@dataclass_transform(frozen_default=True)
class Message:
    """Whatever is sent. Each kind of message is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class FromWorker(Message):
    """What a worker sends to its launcher."""


class Told(FromWorker):
    """What a worker tells its launcher."""


class Request(FromWorker):
    """What a worker asks its launcher; it waits for the answer."""


class ToWorker(Message):
    """What the launcher answers."""


class ToServer(Message):
    """What the launcher tells its fork server."""


class FromServer(Message):
    """What the fork server tells its launcher."""


class Begun(Told):
    """The program begins now; what happened before can always be repeated."""


class Ready(Told):
    """The program uses Unisono: it can be run again from its start to replace a worker."""


class MakesGroup(Told):
    """The worker is about to make a process group with others."""


class NoRecovery(Told):
    """From now on a lost worker cannot be replaced, for this reason."""

    reason: str


class JointResult(Told):
    """The outcome of the `index`-th joint call, `name`; of a loop, where it ended.

    A loop that was left before its end has no outcome that a replacement can use: no payload.
    """

    index: int
    name: str
    payload: bytes


class LoopBegan(Told):
    """The `index`-th joint call is a loop that can be joined now; `facts` are for who joins."""

    index: int
    facts: Mapping[str, Any]


class MemoryReleased(Told):
    """The worker does not need this memory any more."""

    key: int


class RemoveAtEnd(Told):
    """Remove this file, if there is one, when the job has ended, however it ends."""

    path: str


class KeepFile(Told):
    """Take :class:`RemoveAtEnd` back."""

    path: str


class ShowProgress(Told):
    """Draw how far the run is: a :class:`unisono.runtime.launch.cell.DisplayState`."""

    state: Mapping[str, Any]


class ProgramDone(Told):
    """The program has come to its end; `payload` is its pickled result."""

    payload: bytes


class ProgramFailed(Told):
    """The program has raised an exception."""

    exit_code: int  # the process's own
    summary: str  # the exception in one line
    traceback: str  # what Python would print
    waited_for: int | None  # the worker whose end the exception is about, if it is about one
    is_disconnect: bool  # whether the exception only says that a connection to another worker broke
    payload: bytes  # the pickled exception


class MemoryRequest(Request):
    """Share memory with every worker that asks with the same key. Answer: MemoryGranted.

    Memory with a key from :data:`DATA_KEYS` on is kept as long as the job; with one from
    :data:`ROW_KEYS` on it is a file without a name, or the one at `path`.
    """

    key: int
    num_bytes: int
    path: str = ""


class Stopped(Request):
    """The worker stands still at its `arrivals`-th meeting or after it. Answer: Continue."""

    arrivals: int
    between_steps: bool


class CatchUp(Request):
    """A replacement comes to the `index`-th joint call, `name`. Answer: Passed or Live."""

    index: int
    name: str


class WriteRequest(Request):
    """Write a snapshot as a checkpoint once earlier ones are written. Answer: Acknowledged."""

    # where it lies and where it goes, as :class:`unisono.runtime.checkpoint.writer.Kept`
    slot: Mapping[str, Any]
    wait: bool  # answer only when it is on the disk, or has failed


class LockRequest(Request):
    """Keep other jobs out of a run directory. Answer: Acknowledged."""

    directory: str


class Acknowledged(ToWorker):
    """It is done."""


class MemoryGranted(ToWorker):
    """The memory's descriptor."""

    fds: tuple[int, ...]


class Continue(ToWorker):
    """All have stopped: these workers continue."""

    membership: Membership


class Passed(ToWorker):
    """A joint call is over, and a replacement takes its outcome over."""

    payload: bytes  # the outcome
    loop: Mapping[str, Any] | None = None  # of a loop: its facts when it began


class Live(ToWorker):
    """A replacement has caught up with the others and belongs to the membership now."""

    membership: Membership  # the workers, this one among them
    loop: Mapping[str, Any] | None  # of a loop that had begun: its facts then
    is_alone: bool  # nobody else is there; what is shared may be torn
    snapshot: int = 0  # the number of the newest whole one of that loop on this host


class Refused(ToWorker):
    """A request is not granted, for this reason; maybe because of a checkpoint's directory.

    Or, with `is_of_system`, as the operating system has refused something.
    """

    reason: str
    is_of_checkpoint: bool = False
    is_of_system: bool = False


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
    """A worker is there."""

    rank: int
    pid: int


class WorkerExited(FromServer):
    """A worker's process has ended."""

    rank: int
    exit_code: int


KINDS: Mapping[str, type[Message]] = {
    kind.__name__: kind
    for group in (Told, Request, ToWorker, ToServer, FromServer)
    for kind in group.__subclasses__()
}


def encode(message: Message) -> tuple[str, bytes, tuple[int, ...]]:
    """Write a message as JSON, the bytes that travel beside it, and its descriptors."""
    fields = fields_of(message)
    payload, fds = fields.pop("payload", b""), fields.pop("fds", ())
    return json.dumps([type(message).__name__, fields]), payload, fds


def decode(header: bytes, payload: bytes, fds: tuple[int, ...]) -> Message:
    """Read what :func:`encode` wrote.

    Raises:
        ValueError: there is no such message, or it has other fields.
    """
    named = json.loads(header)
    name = named[0] if isinstance(named, list) and len(named) == 2 else named
    if not isinstance(name, str) or name not in KINDS or not isinstance(named[1], dict):
        raise ValueError(
            f"a message must be one of {', '.join(KINDS)}, but is {named!r:.200}: both ends must "
            "be of the same version."
        )
    beside = {"payload": payload, "fds": fds}
    present = {k: v for k, v in beside.items() if v or k in types_of(KINDS[name])}
    message: Message = from_fields(KINDS[name], {**named[1], **present})
    return message


T = TypeVar("T")


def fields_of(value: Any) -> dict[str, Any]:
    """Take a dataclass apart into what JSON can hold; mappings are copied as they are."""
    return {
        name: fields_of(found) if dataclasses.is_dataclass(found) else found
        for name in types_of(type(value))
        for found in (getattr(value, name),)
    }


def from_fields(kind: type[T], fields: Any) -> T:
    """Put a dataclass together again.

    Raises:
        ValueError: a field is missing, is one too many, or is not of its type.
    """
    wanted = types_of(kind)
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        seen = ", ".join(map(str, fields)) if isinstance(fields, dict) else repr(fields)
        raise ValueError(
            f"{kind.__name__} must have the fields ({', '.join(wanted)}), but has ({seen}): "
            "both ends must be of the same version."
        )
    return kind(
        **{name: _checked(fields[name], type_, kind, name) for name, type_ in wanted.items()}
    )


def _types_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# Finds the type of each field of a dataclass, by name and in order.
types_of: Callable[[Any], dict[str, Any]] = functools.cache(_types_of)


def _checked(value: Any, type_: Any, kind: type[Any], name: str) -> Any:
    """Give `value` as the type that a field must have."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if type_ is Any or type(value) is type_ or (value is None and types.NoneType in arguments):
        return value
    if origin is types.UnionType:
        return _checked(value, arguments[0], kind, name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_checked(item, arguments[0], kind, name) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return value
    if type_ is float and type(value) is int:
        return float(value)
    if dataclasses.is_dataclass(type_):
        return from_fields(typing.cast("type[Any]", type_), value)
    raise ValueError(
        f"`{name}` of {kind.__name__} must be of type {getattr(type_, '__name__', type_)}, but is "
        f"{value!r}: both ends must be of the same version."
    )


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers that compute together."""

    ranks: tuple[int, ...]  # ascending, at least one
    leader: int  # the one of them that speaks for all: its values are shared, it keeps the clock
    generation: int = 0  # grows with every change
    # what happened to those of the membership before who are not in this one, in words
    why: str = field(default="", compare=False)

    @classmethod
    def of(cls, world_size: int) -> Membership:
        """Have all workers compute together, as in the beginning."""
        return cls(tuple(range(world_size)), leader=0)

    def position(self, rank: int) -> int:
        """Count the workers of the membership before `rank`."""
        return self.ranks.index(rank)

"""What moves bytes between the members of a team; who is alive is never its business.

A communicator connects the members of one membership: its ranks are positions in it. Every wait
looks at the control block, too, and ends when a member has left; the others then make another.

::

    all_to_all ──► Transfer ──► is_ready? ──► join ──► what needs the bytes ──► … ──► wait

On CPUs a transfer is ready once its bytes are there. Where streams order the work it is ready at
once: `join` has the current stream wait for the bytes, and the host goes on.

torch makes a process group with the help of a store, where each rank puts its address and waits for
the others'. Here that store is the control block: no file, no socket, no port to choose. The group
is made in a thread of its own, since torch may wait for seconds for a member that is lost just
then.
"""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_c10d import Store

from unisono.runtime.workers.launcher_messages import Membership
from unisono.runtime.workers.team import Team


class BrokenError(Exception):
    """The data of a call did not come, or could not be sent; the message says why."""


class Transfer(ABC):
    """A call of a communicator that is under way; keeps its tensors alive."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether :meth:`join` returns at once."""

    @abstractmethod
    def join(self) -> None:
        """Order what this worker, or its current stream, does next after the bytes."""


class Carrier(ABC):
    """What transfers are waited for with. Methods raise BrokenError where bytes will not come."""

    @abstractmethod
    def wait(self, transfer: Transfer, patience_s: float = math.inf) -> bool:
        """Wait until the bytes are there, or for so many seconds; tell whether they are."""

    def aside(self) -> AbstractContextManager[Any]:
        """Have what is done inside of the block run beside what the worker computes."""
        return nullcontext()


class Communicator(Carrier):
    """Connects the present members of a team; close it before it is dropped.

    Collective: every member makes one, and all make the same calls of each method in the same
    order. Where transfers are ready at once, the same order of all calls follows from that.
    """

    membership: Membership

    @abstractmethod
    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Transfer:
        """Begin to send each member its part of `sent`, and to receive everybody's for this one.

        Args:
            from_each, to_each: how many bytes of `received` and `sent`, by position.
        """

    @abstractmethod
    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Transfer:
        """Begin to give every member the bytes of all, by position."""

    @abstractmethod
    def close(self) -> None:
        """Leave at once; whoever still waits for this member is told. Not collective."""


Group = TypeVar("Group")

_LOOK_EVERY_S = 0.01


def connect(team: Team, make: Callable[[Store], Group], number: int = 1) -> list[Group]:
    """Make so many process groups of the present members, in other threads. Collective.

    All tell each other their addresses once, for all groups: afterwards one worker may fail where
    another does not notice, so none meets the others here again.
    """
    makings = [_Making(make) for _ in range(number)]
    for making in makings:
        making.start()
    for making in makings:
        making.store.is_asked.wait()
    membership = team.membership
    heard: dict[int, bytes] = {}
    try:
        told = json.dumps([making.store.told for making in makings]).encode()
        heard = team.gather(told, "addresses")
    finally:
        said = list(map(json.loads, heard.values()))
        for at, making in enumerate(makings):
            making.store.answer({k: v for told_by in said for k, v in told_by[at].items()})
    is_whole = team.membership == membership
    for making in makings:
        while making.is_alive() and is_whole and not team.has_lost:
            making.join(_LOOK_EVERY_S)
    if not is_whole or any(making.is_alive() for making in makings):
        raise BrokenError("a worker was lost while the workers were connected")
    groups = [making.group for making in makings if making.group is not None]
    if len(groups) < number:
        error = next(making.error for making in makings if making.group is None)
        raise BrokenError(f"the workers could not be connected: {error}")
    return groups


class _Making(threading.Thread, Generic[Group]):
    """Makes a group; if nobody waits for it any more, it is dropped where it was made."""

    def __init__(self, make: Callable[[Store], Group]) -> None:
        super().__init__(name="unisono-connecting", daemon=True)
        self._make = make
        self.store = Addresses()
        self.group: Group | None = None
        self.error = ""

    def run(self) -> None:
        try:
            self.group = self._make(self.store)
        except RuntimeError as error:
            self.error = str(error)  # itself it would keep what it was raised in
        finally:
            self.store.is_asked.set()


class Addresses(Store):
    """What torch takes for a store: the addresses of all, once each has told its own.

    Attributes:
        told: what this rank has put there, by key, in hexadecimal digits.
        is_asked: set once `told` is complete, or somebody waits for what the others have told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, str] = {}
        self.is_asked = threading.Event()
        self._all: dict[str, str] = {}
        self._is_answered = threading.Event()

    def answer(self, everything: dict[str, str]) -> None:
        """Report what all have told."""
        self._all = everything
        self._is_answered.set()

    def set(self, key: str, value: Any) -> None:
        """Tell an address, as bytes: the first call of each rank that has one."""
        self.told[key] = value.hex()
        self.is_asked.set()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all have told what they have."""
        self.is_asked.set()
        self._is_answered.wait()
        if any(key not in self._all for key in keys):
            raise RuntimeError("a worker was lost before it had told its address")

    def get(self, key: str) -> bytes:
        """Return an address."""
        self.wait([key])
        return bytes.fromhex(self._all[key])

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return all(key in self._all for key in keys)

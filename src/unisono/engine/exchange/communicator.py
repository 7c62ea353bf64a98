"""Move bytes between the members of a team, without deciding who is alive.

A communicator connects the members of one membership, in which its ranks are positions. Each wait
also reads the control block and ends when a member has left; the others then make another one.

::

    all_to_all ──► Transfer ──► is_ready? ──► join ──► what needs the bytes ──► … ──► wait

On CPUs a transfer is ready once its bytes have arrived. Where streams order the work, a transfer is
ready immediately: `join` makes the current stream wait for the bytes, and the host continues.

torch makes a process group with a store, through which ranks exchange their addresses. Here the
control block is that store: no file, no socket, no port to choose. The group is made in a separate
thread, since torch may wait for seconds for a member that is lost at that moment.
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

from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.team import Team


class BrokenError(Exception):
    """Raised if the data of a call did not arrive or could not be sent; the message says why."""


class Transfer(ABC):
    """A running call of a communicator; keeps its tensors alive."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether :meth:`join` returns immediately."""

    @abstractmethod
    def join(self) -> None:
        """Make this worker, or its current stream, wait for the bytes."""


class Carrier(ABC):
    """Waits for transfers. Methods raise BrokenError if bytes will not arrive."""

    @abstractmethod
    def wait(self, transfer: Transfer, patience_s: float = math.inf) -> bool:
        """Wait at most `patience_s` seconds for the bytes; return whether they have arrived."""

    def aside(self) -> AbstractContextManager[Any]:
        """Run the work inside the block concurrently with the worker's computation."""
        return nullcontext()


class Communicator(Carrier):
    """Connects the present members of a team; close it before it is dropped.

    Collective: every member makes one, and all make the same calls of each method in the same
    order. If transfers are ready immediately, all calls are in the same order.
    """

    membership: Membership

    @abstractmethod
    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Transfer:
        """Start to send each member its part of `sent`, and to receive this member's from each.

        Args:
            from_each, to_each: the number of bytes in `received` and `sent`, by position.
        """

    @abstractmethod
    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Transfer:
        """Start to gather the bytes of all members, by position, on every member."""

    @abstractmethod
    def close(self) -> None:
        """Close at once; members that still wait for this one get an error. Not collective."""


Group = TypeVar("Group")

_LOOK_EVERY_S = 0.01


def connect(team: Team, make: Callable[[Store], Group], number: int = 1) -> list[Group]:
    """Make `number` process groups of the current members, in other threads. Collective.

    Workers exchange their addresses once, for all groups: after that one worker may fail without
    another noticing, so there is no second synchronization here.
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
            self.error = str(error)  # the error itself would keep its frames alive
        finally:
            self.store.is_asked.set()


class Addresses(Store):
    """A store for torch: the addresses of all ranks, once each has set its own.

    Attributes:
        told: what this rank has set, by key, in hexadecimal digits.
        is_asked: set once `told` is complete, or torch waits for the other ranks' addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, str] = {}
        self.is_asked = threading.Event()
        self._all: dict[str, str] = {}
        self._is_answered = threading.Event()

    def answer(self, everything: dict[str, str]) -> None:
        """Set the addresses of all ranks."""
        self._all = everything
        self._is_answered.set()

    def set(self, key: str, value: Any) -> None:
        """Store an address, as bytes: the first call of each rank that has one."""
        self.told[key] = value.hex()
        self.is_asked.set()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ranks have set their addresses."""
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

"""How the members of a team connect, over the control block.

torch makes a process group with the help of a store, where each rank puts its address and waits for
the others'. Here that store is the control block: no file, no socket, no port to choose. The group
is made in a thread of its own, since torch may wait for seconds for a member that is lost just
then; this worker goes on as soon as it knows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import Store

from unisono.exchange.communicator import BrokenError
from unisono.workers.team import Team

Group = TypeVar("Group")

_LOOK_EVERY_S = 0.01


def connect(team: Team, make: Callable[[Store], Group], number: int = 1) -> list[Group]:
    """Make process groups of the present members. Collective.

    All tell each other their addresses once, for all groups: afterwards one worker may fail where
    another does not notice, so none meets the others here again.

    Args:
        make: makes a group with a store; runs in other threads.
        number: how many groups to make.

    Raises:
        BrokenError: a member was lost meanwhile, or a group could not be made.
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
        """Say what all have told."""
        self._all = everything
        self._is_answered.set()

    def set(self, key: str, value: Any) -> None:
        """Tell an address, as bytes: the first call of each rank that has one."""
        self.told[key] = value.hex()
        self.is_asked.set()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all have told what they have.

        Raises:
            RuntimeError: somebody was lost before it had told its address.
        """
        self.is_asked.set()
        self._is_answered.wait()
        if any(key not in self._all for key in keys):
            raise RuntimeError("a worker was lost before it had told its address")

    def get(self, key: str) -> bytes:
        """Give an address."""
        self.wait([key])
        return bytes.fromhex(self._all[key])

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""
        return all(key in self._all for key in keys)

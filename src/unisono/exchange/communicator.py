"""A process group for the gradients of one membership: who is alive is never its business.

Its ranks are positions in the membership. They tell each other their addresses over the control
block, so there is no store, no file and no port to choose. Every wait looks at the control block,
too, and ends when a member has left; the members that are left then make another group.

On CPUs the group is gloo's, on the loopback interface.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from unisono.workers.team import Team

_LOOK_EVERY = timedelta(milliseconds=50)
# After this a call fails, and its callers make another group: a worker that does not come is waited
# for, and judged, where all meet on the control block.
_TIMEOUT = timedelta(seconds=30)
# It takes some milliseconds, unless somebody is lost just then; gloo makes 5 s of it.
_CONNECT_WITHIN = timedelta(seconds=1)


class BrokenError(Exception):
    """The data of a call did not come, or could not be sent; the message says why."""


class Communicator:
    """Moves bytes between the members of a team. Final; close it before it is dropped.

    Collective: every member makes one, and all make the same calls in the same order.

    Args:
        team: the workers; the communicator connects the present members.

    Raises:
        BrokenError: a member was lost meanwhile.
    """

    def __init__(self, team: Team) -> None:
        self._team, self.membership = team, team.membership
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = _CONNECT_WITHIN
        # What gloo's threads use must outlive them: they could not free it, as they have no GIL.
        self._in_use: tuple[object, ...] = ()
        self._group: Any = None
        self._addresses = _Addresses(team)
        size = len(team.membership.ranks)
        try:
            self._group = ProcessGroupGloo(self._addresses, team.position, size, options)
        except RuntimeError as error:
            raise BrokenError(f"the workers could not be connected: {error}") from error
        self._group.set_timeout(_TIMEOUT)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> None:
        """Send each member its part of `sent`, and receive everybody's for this one.

        Args:
            received: bytes, shape (sum of `from_each`,).
            sent: bytes, shape (sum of `to_each`,).
            from_each: how many bytes come from each member, by position.
            to_each: how many bytes go to each member, by position.

        Raises:
            BrokenError: see the class.
        """
        self._in_use = (received, sent)
        self._await(self._group.alltoall_base(received, sent, from_each, to_each))

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give every member the bytes of all.

        Args:
            received: bytes, shape (members · n,), by position.
            sent: bytes of this member, shape (n,).

        Raises:
            BrokenError: see the class.
        """
        self._in_use = (received, sent)
        self._await(self._group._allgather_base(received, sent))

    def close(self) -> None:
        """Leave; members that still wait for this one are told. Not collective."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        del group
        self._in_use = ()

    def _await(self, work: Work) -> None:
        while True:
            try:
                work.wait(_LOOK_EVERY)
            except RuntimeError as error:
                if work.is_completed():
                    raise BrokenError(str(error)) from error
            else:
                return
            if self._team.has_lost:
                raise BrokenError("a worker was lost")


class _Addresses(Store):
    """What gloo takes for a store: the addresses of all, once each has told its own."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team
        self._own: dict[str, str] = {}
        self._all: dict[str, str] | None = None

    def set(self, key: str, value: Any) -> None:
        """Keep an own address; gloo's is bytes."""
        self._own[key] = value.hex()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Hear everybody's addresses. Collective the first time.

        Raises:
            RuntimeError: somebody was lost meanwhile.
        """
        if self._all is None:
            self._all = {}
            for said in self._team.gather(json.dumps(self._own).encode(), "addresses").values():
                self._all |= json.loads(said)
        if any(key not in self._all for key in keys):
            raise RuntimeError("a worker was lost before it had told its address")

    def get(self, key: str) -> bytes:
        """Give an address."""
        self.wait([key])
        assert self._all is not None
        return bytes.fromhex(self._all[key])

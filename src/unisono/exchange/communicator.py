"""What moves bytes between the members of a team; who is alive is never its business.

A communicator connects the members of one membership: its ranks are positions in it. They find each
other over the control block (``connecting.py``). Every wait looks at the control block, too, and
ends when a member has left; the members that are left then make another communicator.

::

    all_to_all ──► Transfer ──► is_ready? ──► join ──► what needs the bytes ──► … ──► wait

On CPUs a transfer is ready once its bytes are there. Where streams order the work it is ready at
once: `join` has the current stream wait for the bytes, and the host goes on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unisono.workers.membership import Membership


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
        """Order what this worker, or its current stream, does next after the bytes.

        Raises:
            BrokenError: they will not come.
        """


class Communicator(ABC):
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
            received: bytes, shape (sum of `from_each`,).
            sent: bytes, shape (sum of `to_each`,).
            from_each: how many bytes come from each member, by position.
            to_each: how many bytes go to each member, by position.

        Raises:
            BrokenError: nothing can be sent any more.
        """

    @abstractmethod
    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Transfer:
        """Begin to give every member the bytes of all.

        Args:
            received: bytes, shape (members · n,), by position.
            sent: bytes of this member, shape (n,).

        Raises:
            BrokenError: nothing can be sent any more.
        """

    @abstractmethod
    def wait(self, transfer: Transfer, patience_s: float = math.inf) -> bool:
        """Wait until the bytes are there, or for so many seconds.

        Returns:
            Whether they are there.

        Raises:
            BrokenError: they will not come, or a member has left.
        """

    def aside(self) -> AbstractContextManager[Any]:
        """Have what is done inside of the block run beside what the worker computes."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Leave at once; whoever still waits for this member is told. Not collective."""

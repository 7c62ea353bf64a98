"""What a collective hands back: done already, or (for a receive) done when somebody waits for it.

torch asks a Work for :meth:`wait`, :meth:`is_completed` and a future with a list of tensors; its
C++ part sees the overrides of the first and the last.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from unisono.c10d.messages import Messages, Receive
from unisono.c10d.uncompiled import never_compiled


@never_compiled
class Finished(Work):
    """Of a call that has been carried out on the caller's thread."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Say yes."""
        return True

    def is_success(self) -> bool:
        """Say yes: a call that fails raises instead of returning a Work."""
        return True

    def exception(self) -> None:
        """Know of none."""

    def synchronize(self) -> None:
        """Return at once."""

    def result(self) -> list[Any]:
        """Return the tensors that the call has filled."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has the tensors already."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


@never_compiled
class Receiving(Finished):
    """Of a receive: whoever waits for it takes the message. Final."""

    def __init__(self, messages: Messages, receive: Receive) -> None:
        super().__init__([receive.tensor])
        self._messages = messages
        self._receive = receive

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is in the tensor."""
        limit_s = timeout.total_seconds() if timeout is not None else 0.0
        self._messages.wait(self._receive, limit_s if limit_s > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Look whether the message has come."""
        return self._messages.is_done(self._receive)

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, then return a future that has the tensor: nobody else would complete it."""
        self.wait()
        return super().get_future()

    def source_rank(self) -> int:
        """Tell who sent it, after :meth:`wait`."""
        source = self._receive.arrived_from
        return -1 if source is None else source

    _source_rank = source_rank

"""What a collective hands back: done already, or done by the time somebody has waited for it.

torch asks a Work for :meth:`wait`, :meth:`is_completed` and a future with a list of tensors; its
C++ part sees the overrides of the first and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from unisono.c10d.execution import Call, Execution
from unisono.c10d.messages import Messages, Receive
from unisono.c10d.uncompiled import never_compiled

# Calls a function at once and makes a future of what it returns, with a type that torch's hooks in
# C++ ask for; what `Future.set_result` takes is of any type to them.
_with_type: Any = torch._C.fork


@never_compiled
class Finished(Work):
    """Of a call that has been carried out."""

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
        """Say yes: a call that fails on the caller's thread raises instead of returning a Work."""
        return True

    def exception(self) -> BaseException | None:
        """Know of none."""
        return None

    def synchronize(self) -> None:
        """Return at once."""

    def result(self) -> list[Any]:
        """Return the tensors that the call has filled."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has the tensors already."""
        future: torch.futures.Future[Any]
        try:
            future = _with_type(_itself, self._tensors)
        except RuntimeError:  # an empty list says nothing of its elements
            future = torch.futures.Future()
            future.set_result(self._tensors)
        return future


def _itself(tensors: list[Any]) -> list[Any]:
    return tensors


@never_compiled
class GoingOn(Finished):
    """Of calls that a helper may still be busy with. Final.

    A future of it is complete when one has it. So what a program has called with its result (as
    DDP's hooks do) runs on the program's own thread, at the same place on every rank, and may
    make further calls, which every rank must make in one order.

    Attributes:
        execution: what carries the calls out.
        calls: in their order.
    """

    def __init__(self, tensors: list[Any], execution: Execution, calls: list[Call]) -> None:
        super().__init__(tensors)
        self.execution = execution
        self.calls = calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all is done."""
        limit_s = timeout.total_seconds() if timeout is not None else 0.0
        for call in self.calls:
            self.execution.wait(call, limit_s if limit_s > 0 else None)
        return True

    def synchronize(self) -> None:
        """Wait until all is done."""
        self.wait()

    def is_completed(self) -> bool:
        """Look whether all is done."""
        return all(call.is_done for call in self.calls)

    def is_success(self) -> bool:
        """Look whether all is done and nothing has failed; with that the failure is heard of."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what has failed so far; with that it is heard of."""
        return next(filter(None, map(self.execution.hear, self.calls)), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, then return a future that has the tensors."""
        self.wait()
        return super().get_future()


def together(tensors: list[Any], works: Sequence[Finished]) -> Finished:
    """Join the Works of several calls, whose result is `tensors`, into one."""
    going_on = [work for work in works if isinstance(work, GoingOn)]
    if not going_on:
        return Finished(tensors)
    return GoingOn(tensors, going_on[0].execution, [call for w in going_on for call in w.calls])


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

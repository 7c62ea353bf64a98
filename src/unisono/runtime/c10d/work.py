"""The ``Work`` that a call returns.

torch asks a Work for :meth:`wait`, :meth:`is_completed` and a future with a list of tensors; its
C++ part sees the overrides of the first and the last.

Our methods are kept out of ``torch.compile``, by a mark on their code. While a compiled program
runs, torch may compile every Python function that is about to run. C++ (for example DDP's broadcast
of buffers) calls our Python inside of such programs, and what moves bytes between processes must
not be traced. torch's own decorator would load its compiler, a second of import, in every program;
the mark that it sets does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from unisono.runtime.c10d.execution import Call, Execution
from unisono.runtime.c10d.messages import Messages, Receive

_Class = TypeVar("_Class", bound=type)


def never_compiled(cls: _Class) -> _Class:
    """Mark a class's methods, and whatever they call, as not to be compiled."""
    marks: Any = torch._C._dynamo.eval_frame
    skip = marks._FrameExecStrategy(marks._FrameAction.SKIP, marks._FrameAction.SKIP)
    for method in vars(cls).values():
        while isinstance(method, FunctionType):
            marks.set_code_exec_strategy(method.__code__, skip)
            method = getattr(method, "__wrapped__", None)
    return cls


# Calls a function at once and makes a future of what it returns, with a type that torch's hooks in
# C++ ask for; what `Future.set_result` takes is of any type to them.
_with_type: Any = torch._C.fork


@never_compiled
class GroupWork(Work):
    """Of calls that are done, or (`calls`) that the helper thread may still be busy with.

    A future of it is complete when the program gets it. So callbacks (DDP's hooks add some) run on
    the program's own thread, at the same place on every rank, and may make further calls, which
    every rank must make in one order.
    """

    def __init__(
        self, tensors: list[Any], execution: Execution, calls: Sequence[Call] = ()
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._execution = execution
        self.calls = calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all is done."""
        for call in self.calls:
            self._execution.wait(call, _limit_s(timeout))
        return True

    def synchronize(self) -> None:
        """Wait until all is done."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all is done."""
        return all(call.is_done for call in self.calls)

    def is_success(self) -> bool:
        """Return whether all is done without a failure, which counts as reported then."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the first failure so far, which counts as reported then."""
        return next(filter(None, map(self._execution.hear, self.calls)), None)

    def result(self) -> list[Any]:
        """Return the tensors that the calls fill."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, then return a future that has the tensors."""
        self.wait()
        future: torch.futures.Future[Any]
        try:
            future = _with_type(_itself, self._tensors)
        except RuntimeError:  # an empty list says nothing of its elements
            future = torch.futures.Future()
            future.set_result(self._tensors)
        return future


@never_compiled
class ReceiveWork(GroupWork):
    """Of a receive: waiting for it takes the message. Final."""

    def __init__(self, execution: Execution, messages: Messages, receive: Receive) -> None:
        super().__init__([receive.tensor], execution)
        self._messages = messages
        self._receive = receive

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is in the tensor."""
        self._messages.wait(self._receive, _limit_s(timeout))
        return True

    def is_completed(self) -> bool:
        """Return whether the message has come."""
        return self._messages.is_done(self._receive)

    def synchronize(self) -> None:
        """Return at once."""

    def is_success(self) -> bool:
        """Return True: a message that does not fit raises in :meth:`wait`."""
        return True

    def source_rank(self) -> int:
        """Return the sender, after :meth:`wait`."""
        source = self._receive.arrived_from
        return -1 if source is None else source

    _source_rank = source_rank


def _itself(tensors: list[Any]) -> list[Any]:
    return tensors


def _limit_s(timeout: timedelta | None) -> float | None:
    limit_s = timeout.total_seconds() if timeout is not None else 0.0
    return limit_s if limit_s > 0 else None

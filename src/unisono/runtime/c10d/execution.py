"""Runs the calls of one rank in a group, one after the other, in the order they were made.

A call runs in the thread that makes it: the other ranks are usually microseconds away, and handing
it to another thread would take longer. With ``async_op=True`` the caller must not be blocked by a
late rank, which may itself be waiting for this one elsewhere. Such a call moves after a few
milliseconds, with all calls after it, to the group's *helper* thread. The helper ends when it is
idle for a while, and before Python does: a thread that returns from C++ later would abort Python.

A mark on their code keeps our methods out of ``torch.compile``: C++ (for example DDP's broadcast of
buffers) calls our Python inside of compiled programs, and code that moves bytes between processes
must not be traced. torch's own decorator would load the compiler, which takes a second.
"""

from __future__ import annotations

import atexit
import enum
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar, final

import torch
from torch.distributed import Work

from unisono.errors import MismatchError, WaitTimeoutError
from unisono.runtime.c10d.meeting import Meeting, Meetings
from unisono.runtime.c10d.messages import Messages, Receive
from unisono.runtime.device import flushes_denormals

_PATIENCE_S = 5e-3
_HELPER_STAYS_S = 1.0
_AT_EXIT_AT_MOST_S = 10.0


@final
class Call:
    """One call of this rank; `steps` announces it and carries it out, one barrier at a time.

    `is_done` is True once the helper has finished it, successfully or not; `error` is its failure.
    """

    def __init__(self, meeting: Meeting, steps: Meetings) -> None:
        self._meeting = meeting
        self._steps = steps
        self._has_begun = self._is_waiting = self.flushes = False
        self.is_done = False
        self.error: BaseException | None = None

    def proceed(self, patience_s: float = math.inf, *, spins: bool = True) -> bool:
        """Start or continue the call; return False if a barrier takes longer than `patience_s`.

        A MismatchError, raised on every rank, ends only the call; other errors end the group.
        """
        try:
            with torch.inference_mode():  # it may write to inference and to normal tensors
                if not self._has_begun:
                    self._has_begun = True
                    self._is_waiting = self._meeting.is_ahead  # after a rejected call
                while True:
                    if self._is_waiting and not self._meeting.wait(patience_s, spins=spins):
                        return False
                    self._is_waiting = False
                    if next(self._steps, self) is self:
                        return True
                    self._meeting.arrive()
                    self._is_waiting = True
        except MismatchError:
            raise
        except BaseException as error:
            self.give_up(error)
            raise

    def hand_over(self) -> None:
        """Record this thread's state that the helper needs to continue the call."""
        self.flushes = flushes_denormals()

    def give_up(self, error: BaseException) -> None:
        """End the group for this rank: a call that failed half-way cannot be made again."""
        self._meeting.give_up(str(error) or type(error).__name__)


class _Turn(enum.Enum):
    NOBODY = enum.auto()
    CALLER = enum.auto()
    HELPER = enum.auto()


@final
class Execution:
    """The calls of one rank in a group, in their order.

    A mismatch ends a call on every rank, but not the group. Calls that this rank made before the
    program learned of the mismatch are not run: other ranks may not have made these calls.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may re-enter
        self._changed = threading.Condition(self._lock)
        self._turn = _Turn.NOBODY
        self._waiting: deque[Call] = deque()
        self._caller = 0  # the thread whose turn it is
        self._under_way: Call | None = None  # in the helper
        self._helper: threading.Thread | None = None
        self._is_closed = False
        self._unheard: MismatchError | None = None

    def carry_out(self, call: Call, *, is_async: bool) -> bool:
        """Run a call after all earlier calls; return False if `is_async` and it is still running.

        Raises the call's failure, or the unreported failure of an earlier call.
        """
        with self._lock:
            if self._unheard is not None:
                error, self._unheard = self._unheard, None
                raise error
            is_first = self._turn is _Turn.NOBODY
            if is_first:
                self._turn, self._caller = _Turn.CALLER, threading.get_ident()
            elif self._turn is _Turn.CALLER and self._caller == threading.get_ident():
                raise RuntimeError(
                    "calls of a process group must be made one after the other, but a signal has "
                    "held this thread up in one, and now it makes another: let the handler set a "
                    "flag, and make the call where the program looks at it."
                )
            else:
                call.hand_over()
                self._waiting.append(call)
        if is_first:
            return self._carry_out_here(call, _PATIENCE_S if is_async else math.inf)
        if is_async:
            return False
        try:
            self.wait(call)
        except BaseException as error:
            if not call.is_done:  # interrupted
                call.give_up(error)
            raise
        return True

    def take_failure(self, call: Call) -> BaseException | None:
        """Return a call's failure, which counts as reported then."""
        with self._lock:  # the helper may just have recorded another failure
            if self._unheard is call.error:
                self._unheard = None
        return call.error

    def wait(self, call: Call, timeout_s: float | None = None) -> None:
        """Wait until the helper has finished a call."""
        with self._lock:
            if not self._changed.wait_for(lambda: call.is_done, timeout_s):
                raise WaitTimeoutError(
                    f"a call with `async_op=True` must finish in the {timeout_s} s that you wait "
                    f"for it, but has not: wait longer, or look at what the other ranks do.",
                    missing=(),
                    waited_s=timeout_s or 0.0,
                )
        if (error := self.take_failure(call)) is not None:
            raise error

    def finish(self, timeout_s: float) -> None:
        """Wait until the helper has no more calls to run, for at most `timeout_s` seconds."""
        with self._lock:
            self._changed.wait_for(lambda: self._turn is not _Turn.HELPER, timeout_s)

    def close(self) -> None:
        """Make the helper end as soon as it is idle."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()

    def end_helper(self) -> None:
        """End the helper and, if it is busy, this rank's part in the group."""
        self.close()
        with self._lock:
            helper = self._helper
            if self._turn is _Turn.HELPER and self._under_way is not None:
                self._under_way.give_up(RuntimeError("the program has ended"))
        if helper is not None:
            helper.join(_AT_EXIT_AT_MOST_S)

    def _carry_out_here(self, call: Call, patience_s: float) -> bool:
        is_done = True
        try:
            is_done = call.proceed(patience_s)
        finally:
            with self._lock:
                if not is_done:
                    call.hand_over()
                    self._waiting.appendleft(call)
                if self._waiting:
                    self._call_helper()
                else:
                    self._turn = _Turn.NOBODY
        return is_done

    def _call_helper(self) -> None:
        if self._helper is None:
            helper = threading.Thread(target=self._help, name="unisono-c10d", daemon=True)
            try:
                helper.start()
            except RuntimeError as error:  # no more threads may be available
                self._turn = _Turn.NOBODY
                self._waiting[0].give_up(error)
                self._end(*self._waiting, error=error)
                self._waiting.clear()
                raise
            self._helper = helper
            _WITH_HELPERS.add(self)
        self._turn = _Turn.HELPER
        self._changed.notify_all()

    def _help(self) -> None:
        while call := self._next():
            try:
                torch.set_flush_denormal(call.flushes)  # a mode of each thread
                call.proceed(spins=False)
            except MismatchError as error:
                with self._lock:
                    self._unheard = error
                    self._end(call, *self._waiting, error=error)
                    self._waiting.clear()
            except BaseException as error:
                self._end(call, error=error)
            else:
                self._end(call)

    def _end(self, *calls: Call, error: BaseException | None = None) -> None:
        with self._lock:
            for call in calls:
                call.error = error
                call.is_done = True
            self._changed.notify_all()

    def _next(self) -> Call | None:
        with self._lock:
            if self._turn is _Turn.HELPER and not self._waiting:
                self._turn = _Turn.NOBODY
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._turn is _Turn.HELPER or self._is_closed, _HELPER_STAYS_S
            )
            if self._turn is not _Turn.HELPER:
                self._helper = self._under_way = None
                return None
            self._under_way = self._waiting.popleft()
            return self._under_way


_WITH_HELPERS: weakref.WeakSet[Execution] = weakref.WeakSet()
os.register_at_fork(after_in_child=_WITH_HELPERS.clear)  # a child has none of its parent's threads


@atexit.register
def _end_helpers() -> None:
    for execution in list(_WITH_HELPERS):
        execution.end_helper()


_Class = TypeVar("_Class", bound=type)


def never_compiled(cls: _Class) -> _Class:
    """Exclude a class's methods, and whatever they call, from compilation."""
    marks: Any = torch._C._dynamo.eval_frame
    skip = marks._FrameExecStrategy(marks._FrameAction.SKIP, marks._FrameAction.SKIP)
    for method in vars(cls).values():
        while isinstance(method, FunctionType):
            marks.set_code_exec_strategy(method.__code__, skip)
            method = getattr(method, "__wrapped__", None)
    return cls


# Calls a function at once and makes a future of its result, with a type that torch's hooks in C++
# request; `Future.set_result` loses the type.
_with_type: Any = torch._C.fork


@never_compiled
class GroupWork(Work):
    """A Work for calls that are done, or (`calls`) that the helper thread may still be running.

    Its future is complete when the program gets it, so callbacks run on the program's own thread,
    in the same place on every rank, and may make further calls.
    """

    def __init__(
        self, tensors: list[Any], execution: Execution, calls: Sequence[Call] = ()
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._execution = execution
        self.calls = calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all calls are done."""
        for call in self.calls:
            self._execution.wait(call, _limit_s(timeout))
        return True

    def synchronize(self) -> None:
        """Wait until all calls are done."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all calls are done."""
        return all(call.is_done for call in self.calls)

    def is_success(self) -> bool:
        """Return whether all calls succeeded; a failure counts as reported then."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the first failure so far, which counts as reported then."""
        return next(filter(None, map(self._execution.take_failure, self.calls)), None)

    def result(self) -> list[Any]:
        """Return the tensors that the calls fill."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, then return a future that has the tensors."""
        self.wait()
        future: torch.futures.Future[Any]
        try:
            future = _with_type(_itself, self._tensors)
        except RuntimeError:  # the type of an empty list's elements is unknown
            future = torch.futures.Future()
            future.set_result(self._tensors)
        return future


@final
@never_compiled
class ReceiveWork(GroupWork):
    """The Work of a receive: waiting for it receives the message."""

    def __init__(self, execution: Execution, messages: Messages, receive: Receive) -> None:
        super().__init__([receive.tensor], execution)
        self._messages = messages
        self._receive = receive

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is in the tensor."""
        self._messages.wait(self._receive, _limit_s(timeout))
        return True

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
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

"""Who carries a call out? The thread that makes it, unless it would have to wait for long.

The calls of one rank in a group are carried out one after the other, in the order in which they
were made. Most are done where they are called: the others are microseconds away, and handing a call
to another thread would take longer than that. But whoever said ``async_op=True`` must not be held
up by somebody who comes late, and maybe waits for us elsewhere. So after a few milliseconds such a
call, and all after it, go on in a thread of the group's own, the *helper*. It ends when it has had
nothing to do for a while.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from typing import NoReturn

import torch

from unisono.c10d.board import Meetings
from unisono.c10d.meeting import Meeting
from unisono.errors import MismatchError, WaitTimeoutError

_PATIENCE_S = 5e-3
_HELPER_STAYS_S = 1.0
_LOOK_EVERY_S = 5e-3


class Call:
    """One call of this rank. Final.

    Args:
        meeting: where the ranks meet.
        steps: announces the call and carries it out, meeting by meeting.

    Attributes:
        is_done: whether the helper has carried it out, or has failed to.
        error: what it has failed with there.
    """

    __slots__ = ("_is_waiting", "_meeting", "_steps", "error", "is_done")

    def __init__(self, meeting: Meeting, steps: Meetings) -> None:
        self._meeting = meeting
        self._steps = steps
        self._is_waiting = False
        self.is_done = False
        self.error: BaseException | None = None

    def proceed(self, patience_s: float = math.inf, *, spins: bool = True) -> bool:
        """Carry on with it, and return whether it is done: False where patience was lost.

        Raises:
            MismatchError: on every rank, and at the same meeting: the group lives on.
            BaseException: whatever else went wrong; the group has ended for this rank.
        """
        try:
            with torch.inference_mode():  # it may write to tensors of either kind
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

    def give_up(self, error: BaseException) -> None:
        """End the group for this rank: a call that has failed half-way cannot be made again."""
        self._meeting.give_up(str(error) or type(error).__name__)


class _Turn(enum.Enum):
    """Who may carry out calls now."""

    NOBODY = enum.auto()
    CALLER = enum.auto()
    HELPER = enum.auto()


class Execution:
    """The calls of one rank in a group, in their order. Final.

    A mismatch ends a call on every rank, and the group lives on. What this rank has called before
    the program hears of it is not carried out: the others may have heard of it at once, and then
    did not call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._turn = _Turn.NOBODY
        self._waiting: deque[Call] = deque()
        self._has_helper = False
        self._is_closed = False
        self._unheard: MismatchError | None = None

    def carry_out(self, call: Call, *, is_async: bool) -> bool:
        """Carry a call out after all that were made before it.

        Args:
            call: made by this rank.
            is_async: return within milliseconds, done or not.

        Returns:
            Whether it is done: always, unless `is_async`.

        Raises:
            BaseException: what it has failed with, if that is known already.
        """
        with self._lock:
            if self._unheard is not None:
                self._raise(self._unheard)
            is_first = self._turn is _Turn.NOBODY
            if is_first:
                self._turn = _Turn.CALLER
            else:
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

    def wait(self, call: Call, timeout_s: float | None = None) -> None:
        """Wait until the helper has carried out a call, at most for some time.

        Raises:
            BaseException: what it has failed with.
            WaitTimeoutError: it goes on.
        """
        with self._lock:
            if not self._changed.wait_for(lambda: call.is_done, timeout_s):
                raise WaitTimeoutError(
                    f"a call with `async_op=True` must be done in the {timeout_s} s that it is "
                    f"waited for, but goes on: wait for longer, or look at what other ranks do.",
                    missing=(),
                    waited_s=timeout_s or 0.0,
                )
        if call.error is not None:
            self._raise(call.error)

    def finish(self, timeout_s: float) -> None:
        """Wait until the helper has nothing left to carry out, at most for some time."""
        end = time.monotonic() + timeout_s
        while self._turn is _Turn.HELPER and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Let the helper end as soon as it has nothing to do."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()

    def _carry_out_here(self, call: Call, patience_s: float) -> bool:
        is_done = True
        try:
            is_done = call.proceed(patience_s)
        finally:
            with self._lock:
                if not is_done:
                    self._waiting.appendleft(call)
                if self._waiting:
                    self._turn = _Turn.HELPER
                    self._call_helper()
                else:
                    self._turn = _Turn.NOBODY
        return is_done

    def _call_helper(self) -> None:
        if not self._has_helper:
            self._has_helper = True
            threading.Thread(target=self._help, name="unisono-c10d", daemon=True).start()
        self._changed.notify_all()

    def _raise(self, error: BaseException) -> NoReturn:
        if self._unheard is error:
            self._unheard = None
        raise error

    def _help(self) -> None:
        while call := self._next():
            try:
                call.proceed(spins=False)
            except BaseException as error:
                self._end(call, error)
            else:
                self._end(call)

    def _end(self, call: Call, error: BaseException | None = None) -> None:
        with self._lock:
            ended = [call]
            if isinstance(error, MismatchError):
                self._unheard = error
                ended += self._waiting
                self._waiting.clear()
            for one in ended:
                one.error = error
                one.is_done = True
            self._changed.notify_all()

    def _next(self) -> Call | None:
        with self._lock:
            if self._turn is _Turn.HELPER and not self._waiting:
                self._turn = _Turn.NOBODY
            self._changed.wait_for(self._is_wanted_or_closed, _HELPER_STAYS_S)
            if self._turn is not _Turn.HELPER:
                self._has_helper = False
                return None
            return self._waiting.popleft()

    def _is_wanted_or_closed(self) -> bool:
        return self._turn is _Turn.HELPER or self._is_closed

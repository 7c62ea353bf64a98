"""Ctrl-C and preemption notices without our launcher: plain Python, torchrun, srun, mpirun.

Finish the step, save it, then end. The first signal requests this, even if only one worker receives
it; the others learn of it at their next barrier. The second signal ends the program at once. Some
launchers send each signal twice.

A request outlives the loop that it arrives in, and takes effect at the end of the loop. A notice
between two loops takes effect at the workers' next collective call, or at the end of the program.
Ctrl-C between loops is handled by Python, and so are all signals in interactive sessions.

The program's own handler, such as submitit's, which requeues its job, is called once the checkpoint
is written. If it returns, training continues.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from unisono.runtime import signals
from unisono.runtime.notices import say
from unisono.runtime.workers.team import Team
from unisono.runtime.world import per_process


@final
class Interrupts:
    """Records signals instead of ending the program; use :func:`interrupts`.

    The object is the handler; :func:`unisono.runtime.signals.is_free` checks `gives_way`.
    """

    gives_way = True

    def __init__(self) -> None:
        self._team: Team | None = None
        self._say: Callable[[str], None] = say
        self._kept: Callable[[], str] = str
        self._before: dict[int, Any] = {}
        self._heard: set[int] = set()  # signals that this worker received itself
        self._heard_at_s = 0.0
        self._num_loops = 0

    @contextmanager
    def in_loop(
        self, team: Team, say: Callable[[str], None], kept: Callable[[], str]
    ) -> Iterator[None]:
        """Record signals during a loop; `kept` returns where its newest checkpoint is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if self._team is None and not _is_interactive():
            atexit.register(self._end_of_program, os.getpid())
        self._team, self._say, self._kept = team, say, kept
        for signum in signals.ENDING_SIGNALS:
            before = signal.getsignal(signum)
            is_own = signum in signals.NOTICES and _is_own(before)
            if signum not in self._before and (is_own or signals.is_free(signum)):
                self._before[signum] = before  # first: the signal may arrive at once
                signal.signal(signum, self)
        self._num_loops += 1
        try:
            yield
        finally:
            self._num_loops -= 1
            if not self._num_loops:
                self._leave_loop()

    def honour(self, team: Team) -> None:
        """End the program if a signal requests it. Collective where workers receive signals."""
        if team.supervisor.hears_signals:
            signum = max((team.vote(team.signal, "signals") or {0: 0}).values())
            if signum:
                self.end(signum)

    def end(self, signum: int) -> None:
        """End the program as `signum` requests; may return if the program has its own handler."""
        heard, self._heard, kept = self._heard, set(), self._kept()
        if self._team is not None:
            self._team.pass_on(0)
        if not _is_own(self._before.get(signum)):
            error = signals.interruption(signum)
            if kept and isinstance(error, KeyboardInterrupt):  # shown below its traceback
                error.add_note(kept)
            elif kept:
                self._say(kept)
            raise error
        for one in sorted(heard):
            if _is_own(self._before.get(one)):
                self._before[one](one, None)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Record a signal; the second one ends the program at once."""
        assert self._team is not None
        now_s, own = time.monotonic(), _is_own(self._before.get(signum))
        if not self._heard or (own and signum not in self._heard):
            if not self._heard and self._team.pass_on(signum):
                then = "calling the program's handler" if own else signals.ONCE_MORE
                self._say(f"{signals.IN_LOOP if self._num_loops else signals.BETWEEN}; {then}")
            self._heard_at_s = now_s
            self._heard.add(signum)
        elif now_s - self._heard_at_s > signals.ONE_SIGNAL_S:
            if own:
                self._before[signum](signum, frame)
                return
            self._put_back(signals.ENDING_SIGNALS)
            raise signals.interruption(signum)

    def _leave_loop(self) -> None:
        """Restore the other handlers between loops, and deliver the signals meant for them."""
        stays = set() if _is_interactive() else set(signals.NOTICES)
        others = [n for n, before in self._before.items() if _is_own(before) or n not in stays]
        self._put_back(others)
        self._say = say
        heard = self._heard.intersection(others)
        self._heard -= heard
        if heard and not self._heard and self._team is not None:
            self._team.pass_on(0)
        for signum in sorted(heard):
            signal.raise_signal(signum)

    def _put_back(self, signums: Any) -> None:
        for signum in signums:
            if signum in self._before:
                signal.signal(signum, self._before[signum])
                self._before.pop(signum, None)  # a second signal has put all of them back

    def _end_of_program(self, pid: int) -> None:
        """Make the exit status report the signal that should have ended the finished program."""
        if self._team is None or os.getpid() != pid or hasattr(sys, "last_type"):
            return
        if signum := self._team.signal:
            # After Python's own shutdown, which `os._exit` here would skip.
            library = ctypes.CDLL(None)
            library["__cxa_atexit"](library._exit, ctypes.c_void_p(128 + signum), None)


def interrupts() -> Interrupts:
    """Return the signal recorder of this process."""
    return per_process(Interrupts)


def _is_own(handler: object) -> bool:
    """Return whether a handler is the program's, not Python's or the kernel's default."""
    return callable(handler) and handler is not signal.default_int_handler


def _is_interactive() -> bool:
    """Return whether somebody types commands here, in a notebook or a shell."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)

"""Ctrl-C and notices to workers without a launcher of ours: plain Python, torchrun, srun, mpirun.

Finish the step, keep it, then end. The first signal asks, be it of one worker alone, and the others
hear of it at their next meeting; the second ends at once. Some launchers send each signal twice.

A handler of the program's own, such as submitit's, which puts its job into the queue again, is
called once the checkpoint is written. Where it returns, training goes on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from unisono.runtime import signals
from unisono.runtime.workers.team import Team


class Interrupts:
    """Takes note of signals instead of ending, as long as a `with` block lasts. Final."""

    def __init__(self, team: Team, say: Callable[[str], None]) -> None:
        self._team, self._say = team, say
        self._before: dict[int, Any] = {}
        self._heard: set[int] = set()  # signals that this worker has got itself
        self._heard_at_s = 0.0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for signum in signals.ENDING_SIGNALS:
                is_own = signum in signals.NOTICES and _is_own(signal.getsignal(signum))
                if is_own or signals.is_free(signum):
                    self._before[signum] = signal.signal(signum, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._team.supervisor.is_alone:
            self._team.pass_on(0)  # a notebook goes on
        self._put_back()

    def end(self, signum: int, kept: str) -> None:
        """End the program as `signum` asks, once all is `kept`; a handler of its own may return."""
        heard, self._heard = self._heard, set()
        self._team.pass_on(0)
        if not _is_own(self._before.get(signum)):
            error = signals.interruption(signum)
            if kept and isinstance(error, KeyboardInterrupt):  # shown below its traceback
                error.add_note(kept)
            elif kept:
                self._say(kept)
            raise error
        for one in sorted(heard):
            if _is_own(self._before[one]):
                self._before[one](one, None)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        now_s, own = time.monotonic(), _is_own(self._before[signum])
        if not self._heard or (own and signum not in self._heard):
            if not self._heard and self._team.pass_on(signum):
                then = "calling the program's handler" if own else "once more ends it at once"
                self._say(f"finishing the step, then writing a checkpoint; {then}")
            self._heard_at_s = now_s
            self._heard.add(signum)
        elif self._team.supervisor.is_alone or now_s - self._heard_at_s > signals.ONE_SIGNAL_S:
            if own:
                self._before[signum](signum, frame)
                return
            self._put_back()
            raise signals.interruption(signum)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _is_own(handler: object) -> bool:
    """Tell a handler of the program's from those that Python and the kernel have by default."""
    return callable(handler) and handler is not signal.default_int_handler

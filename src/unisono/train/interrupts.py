"""Ctrl-C and SIGTERM in a process that nobody launched: finish the step, keep it, then end.

The first asks, the second ends at once. Under a launcher this is the launcher's business.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Whether somebody wants the process to end after the step under way. Final."""

    def __init__(self) -> None:
        self.asked_by: int | None = None

    def end(self) -> NoReturn:
        """End as the signal would have.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SystemExit: it was another signal.
        """
        raise interruption(self.asked_by or 0)


def interruption(signum: int) -> BaseException:
    """Give what Python raises after Ctrl-C, or what a shell would see after another signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def gentle_interrupts(say: Callable[[str], None]) -> Iterator[Interrupts]:
    """Take note of the first signal instead of ending; where nobody else handles them."""
    interrupts = Interrupts()
    before: dict[int, Any] = {}

    def ask(signum: int, frame: FrameType | None) -> None:
        if interrupts.asked_by is not None:
            for number, handler in before.items():
                signal.signal(number, handler)
            interrupts.end()
        interrupts.asked_by = signum
        say("finishing the step, then writing a checkpoint; once more ends it at once")

    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                before[signum] = signal.signal(signum, ask)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Long waits outside of barriers, which a message about a hang shows."""

import threading
from collections.abc import Callable
from typing import final

from unisono.runtime.workers.context import context

_SHOWN_AFTER_S = 1.0


@final
class ShownWait:
    """A wait of the main thread; it is reported to the launcher after one second."""

    def __init__(self) -> None:
        self._is_shown = False

    def report_if_due(self, waited_s: float, what: Callable[[], str]) -> None:
        """Report the wait to the launcher if it is due."""
        is_due = waited_s >= _SHOWN_AFTER_S and not self._is_shown
        if is_due and threading.current_thread() is threading.main_thread():
            self._is_shown = True
            context().supervisor.show_wait(what())

    def close(self) -> None:
        """Report that the wait is over."""
        if self._is_shown:
            self._is_shown = False
            context().supervisor.show_wait("")

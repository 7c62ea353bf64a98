"""A worker's launcher sees where it waits for others, and so can tell who waits for whom.

Whoever waits wakes now and then to look around, so the processor time of a worker does not tell
that it stands still. Only what the program itself waits for is shown, not what other threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from unisono.workers.context import context

_SHOWN_AFTER_S = 1.0


class ShownWait:
    """A wait that the launcher, if there is one, sees once it has lasted a second. Final."""

    def __init__(self) -> None:
        self._is_shown = False

    def look(self, waited_s: float, what: Callable[[], str]) -> None:
        """Show it if it is time.

        Args:
            waited_s: how long it has lasted.
            what: says what for, in at most 124 letters.
        """
        is_due = waited_s >= _SHOWN_AFTER_S and not self._is_shown
        if is_due and threading.current_thread() is threading.main_thread():
            self._is_shown = True
            context().supervisor.show_wait(what())

    def close(self) -> None:
        """Show that it is over."""
        if self._is_shown:
            self._is_shown = False
            context().supervisor.show_wait("")

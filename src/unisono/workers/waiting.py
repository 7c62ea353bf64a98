"""A worker's launcher sees where it waits for others, and so can tell who waits for whom.

Whoever waits wakes now and then to look around, so the processor time of a worker does not tell
that it stands still. Only what the program itself waits for is shown, not what other threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from unisono.workers.launcher_link import LauncherLink

_SHOWN_AFTER_S = 1.0


class ShownWait:
    """A wait that the launcher, if there is one, sees once it has lasted a second. Final."""

    def __init__(self) -> None:
        self._link: LauncherLink | None = None

    def look(self, waited_s: float, what: Callable[[], str]) -> None:
        """Show it if it is time.

        Args:
            waited_s: how long it has lasted.
            what: says what for, in at most 124 letters.
        """
        if waited_s < _SHOWN_AFTER_S or self._link is not None:
            return
        if threading.current_thread() is threading.main_thread():
            self._link = LauncherLink.from_environment()
            if self._link is not None:
                self._link.control.begin_wait(self._link.world.rank, what().encode())

    def close(self) -> None:
        """Show that it is over."""
        if self._link is not None:
            self._link.control.end_wait(self._link.world.rank)
            self._link = None

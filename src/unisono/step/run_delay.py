"""How long has this thread waited for a free core? The kernel counts it.

``/proc/thread-self/schedstat`` (Documentation/scheduler/sched-stats.rst) has three numbers: how
long the thread ran, how long it waited while it could have run, both in nanoseconds, and how often
it ran. To read it takes about a microsecond.
"""

from __future__ import annotations

import contextlib
import math
import os

_PATH = "/proc/thread-self/schedstat"
_BYTES = 64
_NANOSECONDS_S = 1e-9


class RunDelay:
    """Reads how long the thread that made this has waited for a core. Final; to be closed."""

    def __init__(self, path: str = _PATH) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):  # not every kernel counts
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        """Tell how long it has waited since it began; NaN where nobody knows."""
        if self._fd < 0:
            return math.nan
        try:
            ran, waited, _ = os.pread(self._fd, _BYTES, 0).split()
            return int(waited) * _NANOSECONDS_S if int(ran) else math.nan
        except (OSError, ValueError):
            return math.nan  # the program may have closed it, and opened something else

    def close(self) -> None:
        """Give the descriptor back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

"""Standard input, output and error are open, even if a shell has closed them.

Invariant: after :func:`open_standard_fds` no new descriptor is 0, 1 or 2. Otherwise a channel could
become a worker's standard output, and its prints messages.
"""

from __future__ import annotations

import os
import sys


def open_standard_fds() -> None:
    """Open ``/dev/null`` where descriptors 0 to 2, or Python's streams of them, are closed."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free descriptor is this one, as those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has None for what was closed when it began; `print(file=None)` goes to stdout.
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)

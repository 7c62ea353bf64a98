"""Signals as bytes in a socket, so that a loop over sockets hears them in its own time."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """What has come of some signals. Final; selectors may wait for it."""

    def __init__(self, reading: socket.socket, signums: Sequence[int]) -> None:
        self._reading, self._signums = reading, signums

    def fileno(self) -> int:
        """Return the descriptor that is readable when something has come."""
        return self._reading.fileno()

    def read(self) -> list[int]:
        """Take what has come.

        Python tells of every signal that has a handler, such as the program's own alarms; those
        are nobody's business here.
        """
        return [signum for signum in self._reading.recv(64) if signum in self._signums]


@contextmanager
def signals_as_bytes(signums: Sequence[int]) -> Iterator[Signals]:
    """Hear of each of these signals; for the main thread."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    before = {}
    for signum in signums:
        # Who ignores a signal from the start (nohup, a shell's background job) has a reason.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, lambda signum, frame: None)
    wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield Signals(reading, signums)
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        reading.close()
        writing.close()

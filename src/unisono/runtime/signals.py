"""Signals that end a job; received as bytes, so that a loop over sockets can handle them."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from unisono.runtime.procfs import read_text

# Sent by clusters before they take a machine away, and by the kernel when a terminal is closed.
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
ENDING_SIGNALS = (signal.SIGINT, *NOTICES)
# Slurm and torchrun send a signal both to the agent, which passes it on, and to the processes that
# it started; a second signal within this time counts as the first one.
ONE_SIGNAL_S = 2.0
# Messages about the first signal, in a loop over steps and between two loops.
IN_LOOP = "finishing the step, then writing a checkpoint"
BETWEEN = "stopping before the next step or evaluation, or at the end of the program"
ONCE_MORE = "once more, two seconds later, ends it at once"
# Sent by the kernel to a launcher of several hosts, even twice; see ``cli/several_hosts.py``.
AGENT_ENDED = signal.SIGHUP


def interruption(signum: int) -> BaseException:
    """Return the exception for a signal: KeyboardInterrupt for Ctrl-C, otherwise SystemExit."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block signals, which terminals and Slurm send to all processes, within the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_free(signum: int) -> bool:
    """Return whether a signal has no handler here, not even one in C (`faulthandler.register`).

    Between loops, the handler of :class:`.interrupts.Interrupts` does not count.
    """
    handler = signal.getsignal(signum)
    if getattr(handler, "gives_way", False):
        return True
    if handler is not signal.SIG_DFL:
        return handler is signal.default_int_handler
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", read_text(Path("/proc/self/status")))
    return caught is None or not int(caught[1], 16) >> (signum - 1) & 1


@final
class Signals:
    """The signals that have arrived. Selectors can wait for it."""

    def __init__(self, reading: socket.socket, signums: Sequence[int]) -> None:
        self._reading, self._signums = reading, signums

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has arrived."""
        return self._reading.fileno()

    def read(self) -> list[int]:
        """Return the signals that have arrived; ignore others, such as alarms."""
        with contextlib.suppress(BlockingIOError):
            return [signum for signum in self._reading.recv(64) if signum in self._signums]
        return []


@contextmanager
def signals_as_bytes(signums: Sequence[int]) -> Iterator[Signals]:
    """Receive each of these signals; only for the main thread."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    before = {}
    # First, and removed last: a signal whose handler does nothing must leave its byte.
    wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        for signum in signums:
            handler = signal.getsignal(signum)
            # A signal that is ignored from the start (nohup, a shell's background job) stays so.
            if handler is not signal.SIG_IGN:
                before[signum] = handler
                signal.signal(signum, lambda signum, frame: None)
        yield Signals(reading, signums)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(wakeup_before)
        reading.close()
        writing.close()


@contextmanager
def interrupts() -> Iterator[Signals | None]:
    """Receive as bytes those of Ctrl-C and notices that would otherwise end this process."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    with signals_as_bytes([*filter(_would_end, ENDING_SIGNALS)]) as signals:
        yield signals
        # A signal after the end of the job is for the caller.
        for signum in signals.read():
            raise interruption(signum)


def _would_end(signum: int) -> bool:
    """Return whether only Python, or ipykernel for a cell's ``await``, handles a signal."""
    module = str(getattr(signal.getsignal(signum), "__module__", ""))
    return is_free(signum) or module.split(".")[0] == "ipykernel"

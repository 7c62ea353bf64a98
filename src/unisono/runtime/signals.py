"""Signals that end a job; as bytes, so that a loop over sockets receives them between two turns."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unisono.runtime.procfs import read_text

# What clusters send before they take a machine away, and the kernel when a terminal is closed.
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
ENDING_SIGNALS = (signal.SIGINT, *NOTICES)
# Slurm and torchrun send a signal both to the agent, which passes it on, and to what it started;
# a second one within this time is the first one, come by another way.
ONE_SIGNAL_S = 2.0
# What is said of the first one, in a loop over steps and between two.
IN_LOOP = "finishing the step, then writing a checkpoint"
BETWEEN = "stopping before the next step or evaluation, or at the end of the program"
ONCE_MORE = "once more, two seconds later, ends it at once"
# What a launcher of several hosts gets from the kernel, maybe more than once; see
# ``cli/one_host.py``.
AGENT_ENDED = signal.SIGHUP


def interruption(signum: int) -> BaseException:
    """Return what Python raises after Ctrl-C, or what a shell would see after another signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold signals, which terminals and Slurm send to all, back from what is not ready yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_free(signum: int) -> bool:
    """Return whether nobody handles a signal here, be it in C, as `faulthandler.register` does.

    Between loops, the handler of :class:`.interrupts.Interrupts` gives way.
    """
    handler = signal.getsignal(signum)
    if getattr(handler, "gives_way", False):
        return True
    if handler is not signal.SIG_DFL:
        return handler is signal.default_int_handler
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", read_text(Path("/proc/self/status")))
    return caught is None or not int(caught[1], 16) >> (signum - 1) & 1


class Signals:
    """The signals that have arrived. Final; selectors may wait for it."""

    def __init__(self, reading: socket.socket, signums: Sequence[int]) -> None:
        self._reading, self._signums = reading, signums

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has arrived."""
        return self._reading.fileno()

    def read(self) -> list[int]:
        """Take those signals that have arrived; Python writes others, such as alarms, too."""
        with contextlib.suppress(BlockingIOError):
            return [signum for signum in self._reading.recv(64) if signum in self._signums]
        return []


@contextmanager
def signals_as_bytes(signums: Sequence[int]) -> Iterator[Signals]:
    """Receive each of these signals; for the main thread."""
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


@contextmanager
def interrupts() -> Iterator[Signals | None]:
    """Receive Ctrl-C and notices as bytes, where they would end this process at any moment."""
    handler = signal.getsignal(signal.SIGINT)
    is_default = handler is signal.default_int_handler or _is_of_a_kernel(handler)
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield None
        return
    with signals_as_bytes([signal.SIGINT, *filter(is_free, NOTICES)]) as signals:
        yield signals
        # One that came after the job's end is for the caller.
        for signum in signals.read():
            raise interruption(signum)


def _is_of_a_kernel(handler: object) -> bool:
    """Return whether a kernel has set this for a cell's ``await``, which ends no launcher."""
    return str(getattr(handler, "__module__", "")).split(".")[0] == "ipykernel"

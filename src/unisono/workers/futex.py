"""Waiting for a word of shared memory to change, without burning a core.

Linux futexes on shared mappings. :func:`add_and_wake` adds to the word inside the kernel, which
is atomic and a full memory barrier on every processor: what a worker wrote before it is seen by
whoever sees the new value and then calls :func:`acquire`. Source: futex(2), ``FUTEX_WAIT`` and
``FUTEX_WAKE_OP``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_SYSCALL_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 202)
_READS_STAY_IN_ORDER = platform.machine() == "x86_64"
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_OP_ADD = 1
_EVERYONE = 2**31 - 1
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,  # which system call
    ctypes.c_void_p,  # the word
    ctypes.c_int,  # operation
    ctypes.c_uint32,  # value expected, or how many to wake
    ctypes.c_void_p,  # timeout
    ctypes.c_void_p,  # the word that FUTEX_WAKE_OP changes
    ctypes.c_uint32,  # how FUTEX_WAKE_OP changes it
)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`, at most `timeout_s` seconds.

    Returns also for no reason at all (a signal, say): the caller looks at the word again.
    """
    timespec = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _call(address, _WAIT, expected, ctypes.addressof(timespec))


def wake(address: int) -> None:
    """Wake everyone who sleeps on the word at `address`."""
    _call(address, _WAKE, _EVERYONE)


def add_and_wake(address: int, amount: int = 1) -> None:
    """Add `amount` (0 … 2047) to the word at `address`, then wake everyone who sleeps on it."""
    operation = (_OP_ADD << 28) | (amount << 12)
    _call(address, _WAKE_OP, _EVERYONE, 0, address, operation)


def acquire(address: int) -> None:
    """Order later reads after those made, of a word at `address` that is this process's to change.

    Where processors keep them in order by themselves it costs nothing.
    """
    if not _READS_STAY_IN_ORDER:
        add_and_wake(address, 0)


def _call(
    address: int, operation: int, value: int, timeout: int = 0, second: int = 0, encoded: int = 0
) -> None:
    if _syscall(_SYSCALL_NUMBER, address, operation, value, timeout, second, encoded) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, f"futex: {os.strerror(code)}")

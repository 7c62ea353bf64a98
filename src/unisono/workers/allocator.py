"""Keep freed memory: a process that trains wants the same blocks again in its next step.

glibc gives large blocks back to the kernel when they are freed and takes fresh, zeroed pages for
the next ones; for large layers that is a third of a training step, and of small ones a tenth. Our
workers exist to train, and so do those that another launcher started, and processes that make a
group of our backend: they keep what they have. Source: mallopt(3).
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the C library to serve large blocks from the heap and never to shrink it.

    Returns:
        Whether it is glibc and did so; elsewhere nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER)
    )


def give_freed_memory_back() -> None:
    """Have the C library give what is free now back to the kernel, once. Source: malloc_trim(3)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)

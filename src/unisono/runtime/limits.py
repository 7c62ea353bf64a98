"""Which limit of the shell stands in the way? What the system and torch say names none of them.

Limits are those of this process; workers have the same, as they descend from it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

from unisono.runtime.notices import size

_NO_FILE = "Too many open files"
_NO_PROCESS = ("[Errno 11] Resource temporarily unavailable", "can't start new thread")
# Of Python, the kernel, the loader of shared objects, C++ and torch.
_NO_MEMORY = (
    "MemoryError",
    "Cannot allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "std::bad_alloc",
    "DefaultCPUAllocator",
)


def limits_behind(said: str) -> Iterator[str]:
    """Yield a sentence on each system limit that may have caused an error."""
    if any(words in said for words in _NO_PROCESS):
        yield from _limit(resource.RLIMIT_NPROC, "-u", "processes and threads a user may have")
    if _NO_FILE in said:
        yield from _limit(resource.RLIMIT_NOFILE, "-n", "files a process may have open")
    if any(words in said for words in _NO_MEMORY):
        yield from memory_limit()


def memory_limit() -> Iterator[str]:
    """Yield a sentence if a process may not have as much memory as it likes."""
    yield from _limit(resource.RLIMIT_AS, "-v", "memory a process may reserve")


def _limit(which: int, flag: str, what: str) -> Iterator[str]:
    least = resource.getrlimit(which)[0]
    if least != resource.RLIM_INFINITY:
        shown = size(least) if which == resource.RLIMIT_AS else f"{least:,}"
        yield (
            f"`ulimit {flag}` must allow what a run needs, but limits the {what} to {shown}: raise "
            f"it, in a new shell if need be."
        )

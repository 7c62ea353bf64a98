"""What does a process have only once? It is kept here, and nowhere else.

A fork begins with nothing of its own: it must not use what belongs to its parent, such as a
channel to the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_kept: dict[tuple[Hashable, ...], Any] = {}


def per_process(make: Callable[..., T], *arguments: Hashable) -> T:
    """Give this process's one `make(*arguments)`, made when it is first asked for.

    Threads that ask at once may each make one, of which all get the same.
    """
    key = os.getpid(), make, *arguments
    kept: T | None = _kept.get(key)
    return _kept.setdefault(key, make(*arguments)) if kept is None else kept

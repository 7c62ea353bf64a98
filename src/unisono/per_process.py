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
    """Give this process's one `make(*arguments)`, made when it is first asked for."""
    key = os.getpid(), make, *arguments
    if key not in _kept:
        _kept[key] = make(*arguments)
    kept: T = _kept[key]
    return kept

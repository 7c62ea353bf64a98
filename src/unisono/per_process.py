"""What does a process have only once? It is kept here, and nowhere else.

A fork begins with nothing of its own: it must not use what belongs to its parent, such as a
channel to the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_kept: dict[tuple[int, Callable[[], Any]], Any] = {}


def per_process(make: Callable[[], T]) -> T:
    """Give this process's one `make()`, made when it is first asked for; `make` is a class, say."""
    key = os.getpid(), make
    if key not in _kept:
        _kept[key] = make()
    kept: T = _kept[key]
    return kept

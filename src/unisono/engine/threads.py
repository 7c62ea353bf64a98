"""How many threads compute: part of what fixes a result's bits; set for a time, then put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Compute with `threads` threads inside the block."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Batches in memory that the kernel may not move, from where copies to a GPU need no waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.device import pin


def pinned(batch: Any) -> Any:
    """Pin every tensor of a batch, as torch's DataLoader does; all else stays as it is.

    Objects of one's own are asked to do it themselves, if they have a method ``pin_memory``.
    """
    if callable(getattr(batch, "pin_memory", None)):
        return pin(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: pinned(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pinned, batch))
    if isinstance(batch, (tuple, list)):
        return _like(batch, [pinned(value) for value in batch])
    return batch


def _like(batch: Any, values: Any) -> Any:
    """Give values the type of a batch; plain ones where it cannot be made so."""
    try:
        return type(batch)(values)
    except TypeError:
        return values

"""How many samples a dataset has, if that is known, and whether they are read by number."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from unisono.plan.samples import ENDLESS

_NAMED_AT_MOST = 8


def is_stream(dataset: Any) -> bool:
    """Tell whether a dataset's samples have no numbers, but come one after another."""
    return isinstance(dataset, IterableDataset)


def length_of(dataset: Any) -> int:
    """Count a dataset's samples; :data:`ENDLESS` for a stream that does not say how many it has.

    Raises:
        TypeError: it has no length or gives no samples, so no sample plan can be made for it.
    """
    kind = type(dataset).__name__
    if is_stream(dataset):
        try:
            return len(dataset)
        except TypeError:
            return ENDLESS
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"the dataset must have `__getitem__` and `__len__`, but {kind} does not: pass a "
            f"map-style torch Dataset, a TensorDataset or a list of samples (not a DataLoader)."
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(map(repr, islice(dataset, _NAMED_AT_MOST)))
        raise TypeError(
            f"the dataset must have samples numbered from 0, but {kind} has {keys}: pass one of "
            f'them, such as `datasets["train"]`.'
        )
    return len(dataset)

"""The number of a dataset's samples, and whether they are read by number or one after another."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

_NAMED_AT_MOST = 8


def is_stream(dataset: Any) -> bool:
    """Tell whether a dataset's samples have no numbers, but come one after another."""
    return isinstance(dataset, IterableDataset)


def length_of(dataset: Any) -> int:
    """Count a dataset's samples.

    Raises:
        TypeError: it has no length or gives no samples, so no sample plan can be made for it.
    """
    kind = type(dataset).__name__
    if is_stream(dataset):
        try:
            return len(dataset)
        except TypeError as error:
            raise TypeError(
                f"the dataset must have a length, as epochs are counted, but {kind} is an "
                f"IterableDataset without `__len__`: give it one that says how many samples it "
                f"gives each time, or read it into a list."
            ) from error
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

"""From a dataset and indices to one batch, by the cheapest way that the dataset offers.

Tensor datasets (and subsets of them) take one indexing operation for a whole shard; datasets with
``__getitems__`` one call; all others one ``__getitem__`` a sample. Samples are collated by torch's
``default_collate``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

Fetch = Callable[[torch.Tensor], Any]


def length_of(dataset: Any) -> int:
    """Count a dataset's samples.

    Raises:
        TypeError: it has no length or no indices, so no sample plan can be made for it.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"the dataset must be map-style, with `__getitem__` and `__len__`, but {kind} is an "
            f"IterableDataset, whose samples have no numbers: read it into a list, or give it both."
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"the dataset must have `__getitem__` and `__len__`, but {kind} does not: pass a "
            f"map-style torch Dataset, a TensorDataset or a list of samples (not a DataLoader)."
        )
    return len(dataset)


def fetcher(dataset: Any) -> Fetch:
    """Make the function that takes indices, int64 of shape (samples,), to a batch."""
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda indices: tuple(_rows(tensor, indices) for tensor in tensors)
    if type(dataset) is Subset:
        inner = fetcher(dataset.dataset)
        chosen = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return lambda indices: inner(chosen[indices])
    if callable(getattr(dataset, "__getitems__", None)):
        return lambda indices: default_collate(dataset.__getitems__(indices.tolist()))
    return lambda indices: default_collate([dataset[index] for index in indices.tolist()])


def _rows(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, indices)

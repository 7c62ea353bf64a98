"""DataLoaders that are read as `fit` reads a dataset: shuffled, unless it has an order."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def loader_of(dataset: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
    """Make a loader; `options` are those of torch."""
    has_order = isinstance(dataset, IterableDataset) or options.get("sampler") is not None
    if options.get("shuffle") is None:
        options["shuffle"] = None if has_order else True
    return DataLoader(dataset, batch_size, **options)

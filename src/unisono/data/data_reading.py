"""How samples are read: as a program says, or as its DataLoader does.

A torch DataLoader is taken apart: its dataset, order, `collate_fn` and processes are used, never
the loader itself, which would give each worker whole batches and could not resume. Anything in it
that cannot be kept is refused, with a message that says what to write instead.

Also: how many samples a dataset has, if that is known, and whether they are read by index.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, ValuesView
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from unisono.data.collating import Collate
from unisono.data.epoch_order import Sampler
from unisono.plan.samples import ENDLESS
from unisono.runtime.whole import check_flag, check_whole


@dataclass(frozen=True, slots=True)
class Reading:
    """How samples are read; :meth:`unisono.Trainer.fit` documents each.

    Only a DataLoader sets `loader_workers` and `collate_fn`.
    """

    dataset: Any
    batch_size: int  # 0 if there is a batch sampler
    shuffle: bool | None = None
    sampler: Sampler | None = None
    batch_sampler: Sampler | None = None
    groups: int = 1
    loader_workers: int = 0
    collate_fn: Collate | None = None

    @classmethod
    def of(
        cls,
        dataset: Any,
        batch_size: int | None,
        shuffle: bool | None = None,
        sampler: Sampler | None = None,
        *,
        drop_last: bool = False,
        batch_sampler: Sampler | None = None,
        groups: int = 1,
    ) -> Reading:
        """Interpret the arguments of a program: a dataset, or a DataLoader, which has its own.

        Raises TypeError without a batch size, ValueError for arguments that cannot be used.
        """
        _check_is_one(dataset)
        _check_holds_samples(dataset)
        check_flag("shuffle", shuffle, none="yes, unless there is a sampler")
        check_flag("drop_last", drop_last)
        for name, given_class in {"sampler": sampler, "batch_sampler": batch_sampler}.items():
            if isinstance(given_class, type):
                raise TypeError(
                    f"`{name}` must be a sampler, or a function of (epoch, seed), but is the class "
                    f"{given_class.__name__}: make one, such as `{given_class.__name__}(dataset)`."
                )
        groups = check_whole("groups", groups, at_least=1)
        given = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "sampler": sampler,
            "drop_last": drop_last,
        }
        if isinstance(dataset, DataLoader):
            way = "where a DataLoader is passed, which has its own"
            _check_absent(given | {"batch_sampler": batch_sampler}, way, "or pass `loader.dataset`")
            return replace(_taken_apart(dataset), groups=groups)
        if batch_sampler is not None:
            way = "where a `batch_sampler` says which samples each batch has"
            _check_absent(given, way, "or leave the `batch_sampler` out")
            return replace(_cut_by(batch_sampler, cls(dataset, 0)), groups=groups)
        if batch_size is None:
            raise TypeError(
                "`batch_size` must say how many samples all workers together take in a step, but "
                "is left out: pass `batch_size=64`, for example."
            )
        whole = check_whole("batch_size", batch_size, at_least=1)
        reading = cls(dataset, whole, shuffle, sampler, groups=groups)
        return _without_last(reading) if drop_last else reading

    def of_another(self, dataset: Any) -> Reading:
        """Return how another dataset is read: in the same way, or as its DataLoader says."""
        _check_holds_samples(dataset)
        if isinstance(dataset, DataLoader):
            return _taken_apart(dataset)
        return replace(self, dataset=dataset, sampler=None, batch_sampler=None)

    def in_dataset_order(self) -> Reading:
        """Return how to read the whole dataset in its order, for evaluation; refuse samplers."""
        if self.sampler is not None:
            name = getattr(self.sampler, "__name__", type(self.sampler).__name__)
            raise ValueError(
                f"evaluation must go over every sample of a dataset once, but the DataLoader has "
                f"`{name}`: select the samples with `torch.utils.data.Subset`."
            )
        if not self.batch_size and self.batch_sampler is None:
            raise ValueError(
                "evaluation must know how many samples a pass takes, but the batch sampler of "
                "`fit` only covers its own samples: pass a DataLoader, `DataLoader(test_set, "
                "batch_size=64, collate_fn=…)`, or one with a `batch_sampler`."
            )
        return replace(self, shuffle=False, groups=1)


def _check_holds_samples(dataset: Any) -> None:
    """Raise TypeError for a path, a class, or a begun iterator over a loader, as a dataset."""
    if isinstance(dataset, (str, bytes, os.PathLike)):
        seen, remedy = repr(dataset), f"make one of it, such as `ImageFolder({dataset!r})`"
    elif isinstance(dataset, type):
        name = dataset.__name__
        seen, remedy = f"the class {name}", f"make one, such as `{name}(…)`"
    elif isinstance(dataset, _BaseDataLoaderIter):
        seen, remedy = "an iterator over a DataLoader", "pass the DataLoader itself"
    else:
        return
    raise TypeError(f"the dataset must hold samples, but is {seen}: {remedy}.")


def _check_is_one(dataset: Any) -> None:
    """Raise TypeError for several loaders over which a loop would iterate together."""
    several = dataset.values() if isinstance(dataset, Mapping) else dataset
    is_several = isinstance(several, (list, tuple, ValuesView)) and isinstance(
        next(iter(several), None), DataLoader
    )
    kind = type(dataset).__name__
    if is_several or isinstance(dataset, zip) or kind == "CombinedLoader":
        raise TypeError(
            f"one dataset must say the samples of each step, but {kind} has those of several "
            f"loaders: pass a dataset of pairs, `torch.utils.data.StackDataset(a, b)`, where the "
            f"shorter one is cycled by `Subset(a, [i % len(a) for i in range(len(b))])`, with "
            f"`batch_size=`; its batches are pairs of batches."
        )


def _check_absent(given: Mapping[str, Any], way: str, remedy: str) -> None:
    for name, value in given.items():
        if value not in (None, False):
            raise ValueError(
                f"`{name}` must be left out {way}, but is {value!r:.200}: leave it out, {remedy}."
            )


def _taken_apart(loader: DataLoader[Any]) -> Reading:
    batches = loader.batch_sampler
    if batches is None:
        raise _refusal("no `batch_size`", "make it with one, or pass `loader.dataset`")
    if loader.worker_init_fn is not None:
        raise _refusal(
            "a `worker_init_fn`",
            "leave it out, as generators are seeded for every sample; open files in the dataset "
            "when they are first used",
        )
    if type(loader) is not DataLoader:
        raise _refusal(
            f"its own class ({type(loader).__module__}.{type(loader).__name__})",
            "pass `torch.utils.data.DataLoader(loader.dataset, loader.batch_size, shuffle=True, "
            "collate_fn=loader.collate_fn)`, or one with `batch_sampler=loader.batch_sampler`",
        )
    reading = Reading(
        loader.dataset,
        0,
        loader_workers=loader.num_workers,
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
    )
    return _cut_by(batches, reading)


def _cut_by(batches: Any, reading: Reading) -> Reading:
    """Use the batches of a batch sampler; for torch's BatchSampler, its order and batch size."""
    if type(batches) is not BatchSampler:
        return replace(reading, batch_sampler=batches)
    sized = replace(reading, batch_size=batches.batch_size)
    order = sized if is_stream(reading.dataset) else _in_order_of(batches, sized)
    if not batches.drop_last:
        return order
    is_cut = order.sampler is not None  # into full batches, whatever the sampler returns
    return replace(reading, batch_sampler=batches) if is_cut else _without_last(order)


def _in_order_of(batches: BatchSampler, reading: Reading) -> Reading:
    """Use the order that a loader's sampler stands for."""
    sampler: Any = batches.sampler
    order = reading
    if type(sampler) is SubsetRandomSampler:
        chosen: Any = Subset(reading.dataset, list(sampler.indices))
        order = replace(reading, dataset=chosen, shuffle=True)
    elif type(sampler) is RandomSampler and not sampler.replacement:
        is_whole = sampler.num_samples == length_of(reading.dataset)
        order = replace(reading, shuffle=True) if is_whole else replace(reading, sampler=sampler)
    elif type(sampler) is SequentialSampler and _are_as_many(sampler.data_source, reading):
        order = replace(reading, shuffle=False)
    elif type(sampler) is DistributedSampler and _are_as_many(sampler.dataset, reading):
        order = replace(reading, shuffle=sampler.shuffle)
    else:
        order = replace(reading, sampler=sampler)
    return order


def _are_as_many(samples: Any, reading: Reading) -> bool:
    """Return whether a sampler is over as many samples as the dataset has, so over all of them."""
    return samples is reading.dataset or len(samples) == length_of(reading.dataset)


def _without_last(reading: Reading) -> Reading:
    """Omit the samples after an epoch's last full batch, as ``drop_last=True`` does."""
    length = length_of(reading.dataset)
    kept = length - length % reading.batch_size
    if reading.sampler is not None or (is_stream(reading.dataset) and length != ENDLESS):
        raise ValueError(
            "`drop_last=True` and a sampler or an IterableDataset cannot be combined, as these "
            "say which samples an epoch has: let them leave the last ones out, pass a DataLoader "
            "with both, or leave `drop_last` out, as a short last batch is weighted by its samples."
        )
    if kept == length or length == ENDLESS:
        return reading
    if not kept:
        raise ValueError(
            f"`drop_last=True` must leave one batch of {reading.batch_size} at least, but the "
            f"dataset has only {length} samples: leave it out."
        )

    def order(epoch: int, seed: int) -> torch.Tensor:
        # The caller has seeded the default generator for the epoch.
        whole = torch.arange(length) if reading.shuffle is False else torch.randperm(length)
        return whole[:kept]

    order.__name__ = "drop_last"
    return replace(reading, shuffle=None, sampler=order)


def _refusal(has: str, remedy: str) -> ValueError:
    return ValueError(
        f"a DataLoader must be one that can be divided among workers and resumed, but this one has "
        f"{has}: {remedy}."
    )


_NAMED_AT_MOST = 8


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset's samples have no indices, but come one after another."""
    return isinstance(dataset, IterableDataset)


def length_of(dataset: Any) -> int:
    """Return a dataset's number of samples; :data:`ENDLESS` for a stream without a length.

    Raises:
        TypeError: it has no length or no samples, so there can be no sample plan for it.
    """
    kind = type(dataset).__name__
    held = vars(dataset).values() if hasattr(dataset, "__dict__") else ()
    if any(type(each).__module__.startswith("ray.data.") for each in (dataset, *held)):
        raise TypeError(
            f"the dataset must be the same on every worker, in one order, but {kind} reads Ray "
            f"Data, which gives each worker another part: pass a dataset that each worker opens "
            f"itself, such as the files that Ray Data reads or writes."
        )
    if is_stream(dataset):
        try:
            return len(dataset)
        except TypeError:
            return ENDLESS
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"the dataset must have `__getitem__` and `__len__`, but {kind} does not: pass a "
            f"DataLoader, a map-style torch Dataset or a list of samples, such as `list(samples)`; "
            f"or an IterableDataset, whose `__iter__` starts over in each epoch."
        )
    if trouble := _not_of_samples(dataset):
        raise TypeError(f"the dataset must have samples numbered from 0, but {kind} {trouble}.")
    return len(dataset)


def _not_of_samples(dataset: Any) -> str:
    """Return what a dataset has instead of samples, and what to pass; empty if it has samples."""
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(map(repr, islice(dataset, _NAMED_AT_MOST)))
        first = next(iter(dataset.values()), None)
        if isinstance(first, (torch.Tensor, np.ndarray)):
            rows = f"{{k: v[i] for k, v in data.items()}} for i in range({len(first)})"
            return f"has {keys}: pass a list of samples, `[{rows}]`"
        return f'has {keys}: pass one of them, such as `datasets["train"]`'
    if type(dataset).__module__.split(".")[0] in ("pandas", "polars"):
        return (
            'has columns: pass `TensorDataset(torch.tensor(frame[["a", "b"]].to_numpy(), '
            'dtype=torch.float32), torch.tensor(frame["y"].to_numpy()))`'
        )
    if isinstance(dataset, tuple) and len(dataset) in (2, 3):
        lengths = {len(each) if getattr(each, "shape", ()) else 0 for each in dataset}
        if len(lengths) == 1 and (length := lengths.pop()):
            return f"has {len(dataset)} arrays of {length} rows: pass `TensorDataset(x, y)`"
    return ""

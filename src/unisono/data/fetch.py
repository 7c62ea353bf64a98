"""Read one batch from a dataset, in the cheapest way that the dataset offers.

Tensor datasets (and subsets of them) take one indexing operation for a whole shard; datasets with
``__getitems__`` one call; all others one ``__getitem__`` per sample. One thread reads, both here
and in loader processes, because the number of threads may change bits.

What a dataset draws from the default generators depends on what is read, never on who reads it::

    __getitem__     seeded before each sample, from (seed, epoch, index)
    __getitems__    seeded once per shard, from (seed, epoch, the first index)
    collate_fn      the same, in a separate stream

Generators that the dataset or `collate_fn` holds are seeded with them (``generators.py``).
``index`` is the sample's place in the dataset that was passed, so two entries of a ``Subset`` that
name the same sample are augmented differently. How often a sampler used the sample before in the
epoch is part of the seed. Tensor datasets and lists draw nothing, so nothing is seeded for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from unisono.data.collating import Collate, Collator, listed, said
from unisono.data.data_reading import is_stream, length_of
from unisono.data.second_reading import SecondReading
from unisono.data.stream import StreamReader
from unisono.errors import LoadingError
from unisono.runtime.device import HOST, num_threads

_FEW = 16  # samples that are compared if many are read at once


Keys = Callable[[int], Mapping[int, Any] | None]
"""Maps an epoch to the keys by which to read the dataset, by number; None: read by number."""


class Fetch(Protocol):
    """Maps indices, int64 of shape (samples,), to the batch of these samples in an epoch."""

    def __call__(
        self, indices: torch.Tensor, epoch: int = 0, repeats: torch.Tensor | None = None
    ) -> Any:
        """Read and collate; `repeats`: how often each sample was read before in the epoch."""


def fetcher(
    dataset: Any,
    *,
    seed: int = 0,
    stream: str = "train",
    collate_fn: Collate | None = None,
    batch_size: int = 1,
    shards: int = 1,
    keys: Keys | None = None,
) -> Fetch:
    """Return the function that reads batches of a map-style dataset, or of a stream.

    `stream` is ``"train"`` or ``"evaluate"``, each with separate random numbers; `collate_fn` makes
    a batch of a list of samples, by default torch's; `batch_size` and `shards` are those of the
    global batches, by which a stream is cut; `keys`: the keys by which to read the dataset in an
    epoch, by number, if samples have keys. A ``Subset`` of missing samples is refused.
    """
    length = length_of(dataset)
    collator = Collator(seed, stream, collate_fn, dataset, length)
    if is_stream(dataset):
        return StreamReader(dataset, length, batch_size, shards, collator)
    if keys is not None:
        return Reader(dataset, None, collator, keys)
    leaf = leaf_of(dataset)
    chosen = _Chosen(dataset) if leaf is not dataset else None
    if type(leaf) is TensorDataset and collate_fn is None:
        tensors, num_rows = leaf.tensors, len(leaf)
        if chosen is not None:
            chosen.within(num_rows, torch.arange(length, device=HOST))  # raise errors here

        def rows(indices: torch.Tensor, epoch: int = 0, repeats: torch.Tensor | None = None) -> Any:
            places = indices if chosen is None else chosen.within(num_rows, indices)
            return tuple(tensor.index_select(0, places) for tensor in tensors)

        return rows
    if chosen is not None:
        chosen(torch.arange(length, device=HOST))
    return Reader(leaf, chosen, collator)


def leaf_of(dataset: Any) -> Any:
    """Return the dataset behind every ``Subset``."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def lies_in_memory(leaf: Any) -> bool:
    """Return whether reading samples of a dataset, not a ``Subset``, runs no code."""
    return type(leaf) in (TensorDataset, list, tuple)


@final
class Reader:
    """A :class:`Fetch` for datasets that are read by index or key.

    Args:
        chosen: maps numbers of samples to places in `dataset`; None: the numbers themselves.
        keys: returns the keys by which to read, in an epoch.

    Attributes:
        takes_many: whether the dataset reads several samples at once.
        tell: receives a line for the user.
    """

    def __init__(
        self,
        dataset: Any,
        chosen: Callable[[torch.Tensor], torch.Tensor] | None,
        collator: Collator,
        keys: Keys = lambda epoch: None,
    ) -> None:
        self._dataset, self._chosen, self._collator = dataset, chosen, collator
        self._keys = keys
        self._draws = not lies_in_memory(dataset)
        self.takes_many = self._draws and callable(getattr(dataset, "__getitems__", None))
        self._places: dict[int, int] = {}  # of samples read twice
        self.tell: Callable[[str], object] = lambda line: None
        self._twice: SecondReading | None = None
        if self._draws or collator.is_programs:
            self._twice = SecondReading(collator, lambda line: self.tell(line))

    def __call__(
        self, indices: torch.Tensor, epoch: int = 0, repeats: torch.Tensor | None = None
    ) -> Any:
        """Read and collate samples."""
        numbers = indices.tolist()
        places = numbers if self._chosen is None else self._chosen(indices).tolist()
        if keys := self._keys(epoch):
            places = [keys[number] for number in numbers]
        again = [0] * len(numbers) if repeats is None else repeats.tolist()
        begins = self._collator.begin_epoch(epoch)
        with num_threads(1):
            if self._twice is not None and self._twice.is_due():
                self.check_repeatable(numbers, places, epoch, again)
            samples = self.read(numbers, places, epoch, again)
            batch = self._collator.collate(numbers, samples, epoch, again[0])
            if begins and self._collator.own.made():
                self.check_repeatable(numbers, places, epoch, again)
            return batch

    def check_repeatable(
        self, numbers: Sequence[int], places: Sequence[Any], epoch: int, again: Sequence[int]
    ) -> None:
        """Read the first samples twice and compare them."""
        if self._twice is None:
            return
        few = _FEW if self.takes_many else 1
        place_of, repeat_of = (
            dict(zip(numbers, places, strict=True)),
            dict(zip(numbers, again, strict=True)),
        )
        self._places |= {number: place_of[number] for number in numbers[:few]}

        def read(numbers: Sequence[int], seeds: int) -> Any:
            repeats = [repeat_of.get(number, 0) + seeds for number in numbers]
            return self.read(numbers, [self._places[n] for n in numbers], epoch, repeats)

        other = numbers[-few:]
        self._places |= {number: place_of[number] for number in other}
        self._twice.compare(read, numbers[:few], other, epoch)

    def read(
        self, numbers: Sequence[int], places: Sequence[Any], epoch: int, again: Sequence[int]
    ) -> Any:
        """Read samples: a list, or what the dataset makes of them; raises as a call does."""
        if self.takes_many:
            self._collator.seed_for("samples", epoch, numbers[0], again[0])
            return self._call(self._dataset.__getitems__, places, numbers)
        ask, samples = functools.partial(operator.getitem, self._dataset), []
        for number, place, repeat in zip(numbers, places, again, strict=True):
            if self._draws:
                self._collator.seed_for("sample", epoch, number, repeat)
            named = number if isinstance(place, int) else place
            samples.append(self._call(ask, place, [number], named))
        return samples

    def _call(
        self, ask: Callable[[Any], Any], what: Any, numbers: Sequence[int], *named: Any
    ) -> Any:
        try:
            return ask(what)
        except Exception as error:
            many = "`__getitems__` of " * self.takes_many
            raise LoadingError(
                f"every sample must be readable, but {many}sample{'s' * self.takes_many} "
                f"{listed(named or numbers)} raised {said(error)}: fix the sample, or exclude it "
                f"with `torch.utils.data.Subset`.",
                indices=tuple(numbers),
            ) from error


@final
class _Chosen:
    """The samples of the dataset below that subsets refer to now; a program may change them."""

    def __init__(self, dataset: Any) -> None:
        self._subsets = []
        while type(dataset) is Subset:
            self._subsets.append(dataset)
            dataset = dataset.dataset

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        """Map numbers of samples, int64 of shape (samples,), to numbers in the dataset below."""
        places = numbers
        for at, subset in enumerate(self._subsets):
            if at:
                places = _counted_from_the_start(places, numbers, len(subset.indices))
            places = _taken(subset.indices, places)
        return places

    def within(self, length: int, numbers: torch.Tensor) -> torch.Tensor:
        """Map to numbers from 0 on; raise LoadingError for samples that do not exist."""
        return _counted_from_the_start(self(numbers), numbers, length)


def _taken(indices: Any, places: torch.Tensor) -> torch.Tensor:
    if isinstance(indices, torch.Tensor):
        return indices[places.to(indices.device)].to(HOST, torch.int64)
    if isinstance(indices, np.ndarray):
        return torch.as_tensor(indices[places.tolist()], dtype=torch.int64, device=HOST)
    taken = [indices[place] for place in places.tolist()]
    return torch.as_tensor(taken, dtype=torch.int64, device=HOST)


def _counted_from_the_start(
    chosen: torch.Tensor, numbers: torch.Tensor, length: int
) -> torch.Tensor:
    """Replace negative indices by those that they mean in a dataset of this length."""
    counted = torch.where(chosen < 0, chosen + length, chosen)
    (outside,) = torch.where((counted < 0) | (counted >= length))
    if len(outside):
        number = int(numbers[outside[0]])
        raise LoadingError(
            f"a `Subset` must have indices of its dataset, which has {length} samples, but the "
            f"index at position {number} is {int(chosen[outside[0]])}: leave it out.",
            indices=(number,),
        )
    return counted

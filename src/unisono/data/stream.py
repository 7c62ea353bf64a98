"""From a dataset that gives its samples one after the other to one shard's batch.

Each process reads the whole stream and takes what it needs by position: shards are cut out of it as
out of a map-style dataset that is not shuffled::

    stream     0 1 2 3 4 │ 5 6 7 8 9 │ 10 …      every process reads all of it
    shard      0 1 2 0 1 │ 2 0 1 2 0 │  1        and takes those of its shards

What it has read of the global batch under way it keeps, as one shard comes after the other, and
those of a lost worker come, too. Before each sample generators are seeded from (seed, epoch,
position), as for map-style datasets. Where the run goes back or is resumed, the stream is read
again from its start, and what was computed is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from unisono.data.collating import Collator, said
from unisono.engine.threads import num_threads
from unisono.errors import LoadingError

_END = object()


class StreamReader:
    """A `Fetch` for streams. Final.

    Args:
        dataset: an iterable; its method ``set_epoch``, if it has one, is called before each epoch.
        length: how many samples it gives each time.
        batch_size: of the global batches.
        collator: makes batches.
    """

    def __init__(self, dataset: Any, length: int, batch_size: int, collator: Collator) -> None:
        self._dataset, self._length, self._batch_size = dataset, length, batch_size
        self._collator = collator
        self._iterator: Iterator[Any] | None = None
        self._place: tuple[int, int] | None = None
        self._next = 0
        self._kept: dict[int, Any] = {}

    def __call__(
        self, indices: torch.Tensor, epoch: int = 0, repeats: torch.Tensor | None = None
    ) -> Any:
        """Read on to the global batch that has these positions, and collate them.

        Raises:
            LoadingError: the stream raised, or is shorter or longer than its length.
        """
        positions = indices.tolist()
        with num_threads(1):
            # A file that a parent reads has one place for both, so each process opens its own.
            if self._place != (epoch, os.getpid()) or not self._has(positions):
                self._begin(epoch)
            try:
                self._read_to(positions)
            except BaseException:
                self._place = None
                raise
            samples = [self._kept.pop(position) for position in positions]
            return self._collator.collate(positions, samples, (epoch, *positions))

    def _has(self, positions: list[int]) -> bool:
        """Tell whether these have been kept, or are still to come."""
        return all(p in self._kept or p >= self._next for p in positions)

    def _begin(self, epoch: int) -> None:
        self._collator.seed_for("stream", (epoch,))
        try:
            set_epoch = getattr(self._dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            self._iterator = iter(self._dataset)
        except Exception as error:
            raise LoadingError(
                f"a stream must be readable from its start in every epoch, but that of epoch "
                f"{epoch} raised {said(error)}: mend it."
            ) from error
        self._place = (epoch, os.getpid())
        self._next = 0
        self._kept = {}

    def _read_to(self, positions: list[int]) -> None:
        """Read the global batch that has these positions, if it has not been read."""
        start = positions[0] // self._batch_size * self._batch_size
        stop = min(start + self._batch_size, self._length)
        if self._next >= stop:
            return
        self._kept = {}
        while self._next < stop:
            sample = self._take()
            if self._next > start:
                self._kept[self._next - 1] = sample
        if stop == self._length and self._ask() is not _END:
            raise LoadingError(
                f"a stream must give as many samples as its length says, {self._length}, but goes "
                f"on after them: let `__len__` say how many it gives."
            )

    def _take(self) -> Any:
        sample = self._ask()
        if sample is _END:
            raise LoadingError(
                f"a stream must give as many samples as its length says, {self._length}, but ends "
                f"after {self._next}: let `__len__` say how many it gives, to every process."
            )
        self._next += 1
        return sample

    def _ask(self) -> Any:
        assert self._iterator is not None
        assert self._place is not None
        self._collator.seed_for("sample", (self._place[0], self._next))
        try:
            return next(self._iterator, _END)
        except Exception as error:
            raise LoadingError(
                f"every sample must be readable, but sample {self._next} of the stream raised "
                f"{said(error)}: mend it, or leave it out.",
                indices=(self._next,),
            ) from error

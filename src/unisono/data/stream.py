"""Read one shard's batch from an ``IterableDataset``, which yields its samples one after another.

Each process reads the whole stream and selects its samples by position, in the order of a map-style
dataset that is not shuffled::

    stream     0 1 2 3 4 │ 5 6 7 8 9 │ 10 …      every process reads all of it
    shard      0 1 2 0 1 │ 2 0 1 2 0 │  1        and selects those of its shards

The samples of the current global batch are kept, for the other shards of this worker and for those
of a lost one. If a dataset has a method ``shard(index, num_shards)``, it is called for each shard's
part instead, so no process reads what it does not compute: the part's k-th sample is at position
``index + k * num_shards``. There are as many parts as shards, so bits do not depend on the number
of workers; a dataset whose ``num_shards`` says that it has fewer, such as one of Hugging Face's, is
read whole. Generators are seeded from (seed, epoch, position) before each sample. If the run goes
back or resumes, the stream is read again from its start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, final

import torch

from unisono.data.collating import Collator, said
from unisono.errors import LoadingError
from unisono.plan.samples import ENDLESS
from unisono.runtime.device import num_threads

_END = object()


@final
class StreamPass:
    """Passes through a stream, or through one shard's part of it.

    Its method ``set_epoch``, if it has one, is called before each epoch. `length`: of the stream.
    """

    def __init__(
        self, dataset: Any, length: int, collator: Collator, shard: int = 0, num_shards: int = 1
    ) -> None:
        self._dataset, self._length, self._collator = dataset, length, collator
        self._shard, self._num_shards = shard, num_shards
        self._iterator: Iterator[Any] = iter(())
        self._place: tuple[int, int] | None = None
        self.next = shard

    def leads_to(self, position: int, epoch: int) -> bool:
        """Return whether a position is still ahead, in this epoch and this process."""
        # A file of a parent has one position for both processes, so each process opens it again.
        return self._place == (epoch, os.getpid()) and self.next <= position

    def begin(self, epoch: int) -> None:
        """Move to the start of an epoch."""
        self._collator.begin_epoch(epoch)
        self._collator.seed_for("stream", epoch)
        try:
            set_epoch = getattr(self._dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            part: Any = self._dataset
            if self._num_shards > 1:
                part = part.shard(index=self._shard, num_shards=self._num_shards)
            self._iterator = iter(part)
        except Exception as error:
            raise LoadingError(
                f"a stream must be readable from its start in every epoch, but that of epoch "
                f"{epoch} raised {said(error)}: fix it; if `shard(index=…, num_shards="
                f"{self._num_shards})` of it failed, `to_iterable_dataset(num_shards=…)` has one."
            ) from error
        self._place = (epoch, os.getpid())
        self.next = self._shard

    def read(self, position: int) -> Any:
        """Read up to a position, and return its sample."""
        try:
            while True:
                sample = self._ask()
                if sample is _END:
                    raise self._of_another_length("ends there")
                self.next += self._num_shards
                if self.next > position:
                    break
            if self.next >= self._length and self._ask() is not _END:
                raise self._of_another_length("has more")
        except BaseException:
            self._place = None
            raise
        return sample

    def _ask(self) -> Any:
        assert self._place is not None
        self._collator.seed_for("sample", self._place[0], self.next)
        try:
            return next(self._iterator, _END)
        except Exception as error:
            raise LoadingError(
                f"every sample must be readable, but sample {self.next} of the stream raised "
                f"{said(error)}: fix it, or leave it out.",
                indices=(self.next,),
            ) from error

    def _of_another_length(self, what: str) -> LoadingError:
        done = len(range(self._shard, self.next, self._num_shards))
        whole = len(range(self._shard, self._length, self._num_shards))
        if self._length == ENDLESS:
            return LoadingError(
                f"a stream without a length must yield samples until the run ends, but after "
                f"{done} it {what}: let it start again, train for fewer `steps`, or give it a "
                f"`__len__` to have epochs."
            )
        of = f" of shard {self._shard} of {self._num_shards}" if self._num_shards > 1 else ""
        return LoadingError(
            f"a stream must yield as many samples as its length says, {whole}{of}, but after "
            f"{done} it {what}: let `__len__` return how many it yields, in every process."
        )


@final
class StreamReader:
    """A `Fetch` for streams of as many parts as `shards`."""

    def __init__(
        self, dataset: Any, length: int, batch_size: int, shards: int, collator: Collator
    ) -> None:
        self._length, self._batch_size, self._shards = length, batch_size, shards
        self._collator = collator
        self._has_parts = shards > 1 and _can_be_divided(dataset, shards)
        self._whole = StreamPass(dataset, length, collator)
        self._part = functools.cache(lambda v: StreamPass(dataset, length, collator, v, shards))
        self._kept: dict[tuple[int, int], Any] = {}

    def __call__(
        self, indices: torch.Tensor, epoch: int = 0, repeats: torch.Tensor | None = None
    ) -> Any:
        """Read up to these positions, one shard's of one global batch, and collate them."""
        positions = indices.tolist()
        with num_threads(1):
            if self._has_parts:
                part = self._part(positions[0] % self._shards)
                if not part.leads_to(positions[0], epoch):
                    part.begin(epoch)
                samples = [part.read(position) for position in positions]
            else:
                samples = self._read_of_whole(positions, epoch)
            return self._collator.collate(positions, samples, epoch)

    def _read_of_whole(self, positions: list[int], epoch: int) -> list[Any]:
        start = positions[0] // self._batch_size * self._batch_size
        if not all((epoch, position) in self._kept for position in positions):
            if not self._whole.leads_to(start, epoch):
                self._whole.begin(epoch)
            stop = min(start + self._batch_size, self._length)
            self._kept = {}
            for position in range(start, stop):
                self._kept[epoch, position] = self._whole.read(position)
        return [self._kept.pop((epoch, position)) for position in positions]


def _can_be_divided(dataset: Any, shards: int) -> bool:
    """Return whether a stream can return each shard's part; some limit the number of parts."""
    most = getattr(dataset, "num_shards", None)
    return callable(getattr(dataset, "shard", None)) and not (type(most) is int and most < shards)

"""Watches torch's DataLoader: which samples does each rank read, and in which batches?

Each iteration is cut to its first batches and its last one. If it gets another run's samples, the
indices come from there. What the samplers draw from generators stays the same.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, final

from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler
from torch.utils.data import dataloader as dataloader_module

from unisono.tools.verify.digests import base_of, contents_of, digest_of, rows_of_tensors
from unisono.tools.verify.recorder import Recorder, wrap
from unisono.tools.verify.trace import Contents, Iteration, LoaderFacts

_BATCHES_PLANNED_AT_MOST = 100_000


@final
class LoaderHooks:
    """Hooks around every DataLoader of a process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers = itertools.count()
        self._bases: list[Any] = []
        feed = recorder.options.feed
        self._feed: dict[str, Any] = json.loads(Path(feed).read_text()) if feed else {}

    def install(self) -> None:
        """Install the hooks."""
        wrap(DataLoader, "__init__", self._make_loader)
        kind = dataloader_module._BaseDataLoaderIter
        wrap(kind, "__init__", self._begin)
        wrap(kind, "_reset", self._begin)
        wrap(kind, "__next__", self._give)
        self._recorder.at_end.append(self._record_contents)

    def _make_loader(
        self, before: Callable[..., None], loader: Any, *args: Any, **kwargs: Any
    ) -> None:
        number = next(self._numbers)
        given = inspect.signature(before).bind(loader, *args, **kwargs).arguments
        size = self._feed.get("batch_sizes", {}).get(str(number))
        if size is not None and isinstance(given.get("batch_size"), int):
            given["batch_size"] = size  # that of all ranks together
        before(**given)
        with self._recorder.guarded():
            self._record_loader(number, loader)

    def _record_loader(self, number: int, loader: Any) -> None:
        base, _ = base_of(loader.dataset)
        sampler, batch_sampler = loader.sampler, loader.batch_sampler
        samplers = (loader, sampler, batch_sampler)
        length = len(base) if hasattr(loader.dataset, "__len__") else None
        if length is not None and self._number_of(base) < 0:
            self._bases.append(base)
        dataset = self._number_of(base)
        size = loader.batch_size or getattr(batch_sampler, "batch_size", None)
        self._recorder.write(LoaderFacts(number, dataset, length, size))
        facts = Iteration(
            loader=number,
            dataset=dataset,
            drop_last=any(getattr(one, "drop_last", False) for one in samplers),
            sampler=type(sampler).__name__,
            has_set_epoch=any(hasattr(one, "set_epoch") for one in samplers),
            replaces=isinstance(sampler, WeightedRandomSampler)
            or (isinstance(sampler, RandomSampler) and sampler.replacement),
        )
        loader.__dict__["_verified"] = (facts, itertools.count())

    def _number_of(self, base: Any) -> int:
        """Return a dataset's number; -1 for one without a length."""
        return next((n for n, known in enumerate(self._bases) if known is base), -1)

    def _begin(
        self, before: Callable[..., None], iterator: Any, loader: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Begin an iteration, of a new iterator or a persistent one."""
        iterator._verified = getattr(loader, "_verified", None)
        before(iterator, loader, *args, **kwargs)
        if iterator._verified is not None and not self._recorder.is_exact:
            iterator._num_given, iterator._epoch = 0, -1
            iterator._sampler_iter = self._indices(iterator, loader, iterator._sampler_iter)

    def _give(self, before: Callable[..., Any], iterator: Any) -> Any:
        try:
            batch = before(iterator)
        except StopIteration:
            self._recorder.is_between = True
            raise
        known = None if self._recorder.is_exact else getattr(iterator, "_verified", None)
        if known is not None:
            with self._recorder.guarded():
                at = (known[0].loader, iterator._epoch, iterator._num_given)
                self._recorder.record_batch(at, rows_of_tensors(batch))
            iterator._num_given += 1
        return batch

    def _indices(self, iterator: Any, loader: Any, natural: Iterator[Any]) -> Iterator[Any]:
        """Draw a whole epoch's indices at the first request, and yield some of them."""
        facts, epochs = iterator._verified
        iterator._epoch = epoch = next(epochs)
        facts = replace(facts, epoch=epoch)
        at_most = self._recorder.options.batches
        if iterator._dataset_kind == dataloader_module._DatasetKind.Iterable:
            self._recorder.write(facts)
            yield from itertools.islice(natural, at_most)
            return
        num_batches = _BATCHES_PLANNED_AT_MOST
        with contextlib.suppress(TypeError):
            num_batches = min(num_batches, len(iterator._index_sampler))
        planned = list(itertools.islice(natural, num_batches))
        kept = planned if len(planned) <= at_most else [*planned[: at_most - 1], planned[-1]]
        if (fed := self._fed(facts.place, loader)) is not None:
            kept = fed
        with self._recorder.guarded():
            _, to_base = base_of(loader.dataset)
            own = [[int(index) for index in _listed(batch)] for batch in planned]
            record = replace(
                facts,
                indices=[to_base(index) for batch in own for index in batch],
                kept=[[to_base(int(index)) for index in _listed(batch)] for batch in kept],
                order=digest_of([repr(own).encode()]),
                is_sorted=all(a <= b for a, b in pairwise(chain.from_iterable(own))),
                num_batches=len(planned),
            )
            self._recorder.write(record)
        yield from kept

    def _fed(self, place: tuple[int, int], loader: Any) -> list[Any] | None:
        """Return this loader's indices of what another run read here, or None if impossible."""
        fed = self._feed.get("epochs", {}).get(f"{place[0]}/{place[1]}")
        if fed is None:
            return None
        base, to_base = base_of(loader.dataset)
        by_index = {to_base(index): index for index in range(len(loader.dataset))}
        if len(base) == self._feed["lengths"].get(str(place[0])):
            found = [[by_index.get(index) for index, _ in batch] for batch in fed]
        else:
            by_content = {content: index for index, content in enumerate(contents_of(base))}
            found = [[by_index.get(by_content.get(c, -1)) for _, c in batch] for batch in fed]
        if any(index is None for batch in found for index in batch):
            return None
        return found if loader._auto_collation else list(chain.from_iterable(found))

    def _record_contents(self) -> None:
        for number, base in enumerate(self._bases):
            self._recorder.write(Contents(number, len(base), contents_of(base)))


def _listed(batch: Any) -> Any:
    return batch if isinstance(batch, list | tuple) else [batch]

"""A worker's batches in the order in which it needs them: read here, or prefetched by processes.

::

    places     (epoch 0, batch 0, shard 2) (0, 0, 3) (0, 1, 2) (0, 1, 3) … (1, 0, 2) …
               ▲ returned    ▲──── requested from processes ──▲

While the worker computes the same shards, the next places are known, across the ends of epochs. If
the run goes back or the shards are divided differently, prefetching starts again from there. Shards
taken over within a step are read here. A batch depends on its place alone, not on who reads it. If
a sampler defines the order, new processes begin each epoch, and inherit its order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import dropwhile
from typing import Any, NamedTuple, final

import torch

from unisono.data.epoch_order import LONG as _LONG
from unisono.data.epoch_order import order_on_host
from unisono.data.fetch import Fetch, Reader
from unisono.data.loader_processes import LoaderProcesses
from unisono.plan.samples import ENDLESS, SamplePlan
from unisono.programs.forked import ForkedCopy
from unisono.runtime.device import Device
from unisono.runtime.notices import say
from unisono.runtime.training_progress import At, now
from unisono.runtime.workers.team import Team

_RENEWED_AT_MOST = 8  # number of times that loader processes are forked again


class ShardPosition(NamedTuple):
    """The place of a batch: a shard of a global batch of an epoch, all counted from 0."""

    epoch: int
    batch: int
    shard: int


class _Epoch(NamedTuple):
    order: torch.Tensor | None
    repeats: torch.Tensor | None


def progress_at(
    plan: SamplePlan, first: int, done: tuple[int, int] | None = None, *, in_order: bool = False
) -> Callable[[ShardPosition], At]:
    """Return a function that returns the run's progress at a place.

    `first`: the step at the first batch of the plan's epoch, which is 0 unless a batch sampler
    cuts epochs; all epochs are then assumed to be like the plan's;
    `done`: steps and epochs that are done, if the loop does not train; `in_order`: samples are
    those of a stream, of which processes also read those of other places.
    """

    def at(place: ShardPosition) -> At:
        batch, shard = (0, None) if in_order else plan.as_progress(place.batch, place.shard)
        if done is not None:
            return *done, batch, shard
        step = first + plan.steps_between(plan.epoch, place.epoch) + batch
        return step, place.epoch, batch, shard

    return at


def upcoming(
    plan: SamplePlan,
    shards: Sequence[int],
    start: ShardPosition,
    num_batches: int,
    num_epochs: int = ENDLESS,
) -> Iterator[ShardPosition]:
    """Return the places that a worker computes from `start` on, without shards without samples.

    They end after `num_batches`, counted from the first of the plan's epoch, and `num_epochs`.
    """

    def places() -> Iterator[ShardPosition]:
        first = start.batch
        for epoch in range(start.epoch, num_epochs):
            here, before = plan.at(epoch), plan.steps_between(plan.epoch, epoch)
            for batch in range(first, min(here.steps_per_epoch, num_batches - before)):
                for shard in shards:
                    if here.shard_size(batch, shard):
                        yield ShardPosition(epoch, batch, shard)
            if before + here.steps_per_epoch >= num_batches:
                return
            first = 0

    return dropwhile(start.__ne__, places())


@final
class EarlyBatch:
    """A batch that is read and copied before it is requested."""

    def __init__(self, place: ShardPosition, device: Device, take: Callable[[], Any]) -> None:
        self.place = place
        try:
            batch = take()
        except Exception as error:
            self._raised: Exception | None = error
            return
        self._raised = None
        try:
            self._give = device.bring(batch)
        except RuntimeError:
            # Perhaps there is no room yet; any error is raised again where it belongs.
            self._give = functools.partial(device.move, batch)

    def result(self) -> Any:
        """Return the batch, or raise the error of reading it."""
        if self._raised is not None:
            raise self._raised
        return self._give()


@final
class Loader:
    """Returns batches, of which `num_processes` prefetch; ends them when its block ends.

    `num_batches`, `num_epochs`: see :func:`upcoming`; `progress`: see :func:`progress_at`.
    `look`: records what loader processes have a copy of, if the program may change it; `tell`
    shows a line.
    """

    def __init__(
        self,
        fetch: Fetch,
        plan: SamplePlan,
        *,
        num_processes: int,
        num_batches: int,
        num_epochs: int = ENDLESS,
        device: Device,
        progress: Callable[[ShardPosition], At] = lambda place: (0, *place),
        look: Callable[[], ForkedCopy] | None = None,
        tell: Callable[[str], None] = say,
    ) -> None:
        self._look, self._tell = look, tell
        self._forked: ForkedCopy | None = None
        self._looked_at, self._num_renewed = (-1, -1), 0
        self._device, self._moves = device, not device.is_host
        self._fetch, self._plan = fetch, plan
        self._num_processes = num_processes
        self._num_batches, self._num_epochs = num_batches, num_epochs
        self._now, self._progress = now(), progress
        self._epochs: dict[int, _Epoch] = {}
        self._is_long = plan.num_samples >= _LONG
        self._ahead: LoaderProcesses | None = None
        self._ahead_for: Sequence[int] = ()
        self._early: EarlyBatch | None = None
        self.copies_early = num_processes > 0 and not device.is_host
        self.runs_program = isinstance(fetch, Reader)

    def batch(self, place: ShardPosition, shards: Sequence[int]) -> Any:
        """Return the batch of a place that has samples; `shards` are this worker's, in order."""
        if self._look is not None and self._num_processes and place.shard in shards:
            self._renew_processes(self._look, place)
        if self._early is not None and place.shard in shards:
            early, self._early = self._early, None
            if early.place == place:
                return early.result()
        if self._num_processes == 0 or place.shard not in shards:
            batch = self._read(place)
        else:
            batch = self._take(self._reading_on(place, shards))
        return self._device.move(batch) if self._moves else batch

    def _renew_processes(self, look: Callable[[], ForkedCopy], place: ShardPosition) -> None:
        """Fork new processes once a step if what they read from has changed; or read here."""
        if self._looked_at == (place.epoch, place.batch):
            return
        self._looked_at = place.epoch, place.batch
        why = ""
        if self._forked is None:
            self._forked = look()
            if self._forked.leads_to_run:
                why = f"they would read `{self._forked.leads_to_run}`, which training changes"
        elif changed := self._forked.changed():
            self._forked = look()
            self._early = None
            self._end()
            self._num_renewed += 1
            if self._num_renewed > _RENEWED_AT_MOST:
                why = f"the program changes `{changed}`, which they read, again and again"
        if why:
            self._num_processes, self.copies_early = 0, False
            self._tell(f"samples are read without loader processes, as {why}")

    def take_early(self) -> None:
        """Begin to copy the next batch if it is ready, without waiting; errors come later."""
        ahead = self._ahead
        if self._early is None and ahead is not None and ahead.is_ready():
            place = ahead.under_way[0]
            take = functools.partial(self._take, ahead)
            self._early = EarlyBatch(place, self._device, take)

    def _take(self, ahead: LoaderProcesses) -> Any:
        try:
            return ahead.take()
        except Exception:
            # At once: code that keeps the error keeps the loop, and so the processes.
            self._end()
            raise

    def indices(self, place: ShardPosition) -> list[int]:
        """Return the dataset indices of the samples in the batch of a place."""
        indices: list[int] = self._indices(place).tolist()
        return indices

    def begin_epoch(self, epoch: int, team: Team | None) -> None:
        """Get the order of the next step's epoch, if it is long and drawn; see `order_on_host`."""
        if self._is_long and self._plan.is_drawn and epoch not in self._epochs:
            self._end()  # the previous epoch, whose order takes as much memory
            self._epochs.clear()
            self._epochs[epoch] = _Epoch(order_on_host(self._plan, epoch, team), None)

    def rows(self, place: ShardPosition, choices: Sequence[Sequence[int]]) -> list[Any]:
        """Read batches that each have some of a place's samples, by their places in its batch.

        Raises TypeError for a stream, which cannot be read twice. If loader processes are used, one
        reads, since a dataset may open files in the process that reads first.
        """
        if not self.runs_program:
            raise TypeError("a stream must be read in its order")
        read = functools.partial(self._read, place)
        if self._num_processes == 0:
            batches = [read(rows) for rows in choices]
        else:
            with closing(LoaderProcesses(read, 1, iter(choices))) as processes:
                batches = [processes.take() for _ in choices]
        return [self._device.move(one) for one in batches] if self._moves else batches

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._early = None
        self._end()

    def _read(self, place: ShardPosition, rows: Sequence[int] | None = None) -> Any:
        self._now.at = self._progress(place)
        indices, repeats = self._indices(place), self._epoch(place.epoch).repeats
        if repeats is not None:
            plan = self._plan.at(place.epoch)
            repeats = plan.shard_indices(repeats, place.batch, place.shard)
        if rows is not None:
            indices, repeats = indices[rows], None if repeats is None else repeats[rows]
        return self._fetch(indices, place.epoch, repeats)

    def _indices(self, place: ShardPosition) -> torch.Tensor:
        order, plan = self._epoch(place.epoch).order, self._plan.at(place.epoch)
        return plan.shard_indices(order, place.batch, place.shard)

    def _epoch(self, epoch: int) -> _Epoch:
        """Return the order of an epoch; two are kept, as prefetching is ahead, or a long one."""
        plan, epochs = self._plan, self._epochs
        if epoch not in epochs:
            if len(epochs) == (1 if self._is_long else 2):
                del epochs[next(iter(epochs))]  # before the next one is created: both may be large
            epochs[epoch] = _Epoch(plan.order(epoch), plan.repeats(epoch))
        return epochs[epoch]

    def _reading_on(self, place: ShardPosition, shards: Sequence[int]) -> LoaderProcesses:
        """Return processes that read this place next, and continue for these shards."""
        ahead = self._ahead
        reads_on = self._ahead_for == shards
        if ahead is not None and reads_on and ahead.under_way and ahead.under_way[0] == place:
            return ahead
        self._end()
        order, num_epochs = self._epoch(place.epoch).order, self._num_epochs
        # New processes inherit the next order: a long one, or what a sampler returns by then.
        if order is not None and (self._is_long or self._plan.order_of is not None):
            num_epochs = min(num_epochs, place.epoch + 1)
        places = upcoming(self._plan, shards, place, self._num_batches, num_epochs)
        self._ahead_for = shards
        self._ahead = LoaderProcesses(self._read, self._num_processes, places)
        return self._ahead

    def _end(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

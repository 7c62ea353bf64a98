"""Which samples: the global batch of each step, and each shard's part of it.

The order of an epoch is torch's: ``DistributedSampler`` seeds a generator with ``seed + epoch``
and permutes. Step *t* takes positions *tB* … *(t+1)B − 1* of the order; the sample at position *p*
belongs to shard *p* mod *S*, which is the sample that ``DistributedSampler`` gives to replica
*p* mod *S*. Nothing is padded: the last batch may be short, and one of its shards empty. A sampler
may define the order instead, and with it the length of an epoch. ::

    S = 3, B = 5     position  0 1 2 3 4 │ 5 6 7 8 9 │ 10 11
                     shard     0 1 2 0 1 │ 2 0 1 2 0 │  1  2      (shard 0 of the last is empty)

A batch sampler may also cut an epoch into batches, of any sizes and number. Each batch then begins
with shard 0. With `groups`, so many neighbours stay together in a shard. ::

    S = 3            position  0 1 2 3 │ 4 │ 5 6        batches of 4, 1 and 2
                     shard     0 1 2 0 │ 0 │ 0 1
    S = 2, groups=2  position  0 1 2 3 4 5 │ 6 7        GRPO: all answers to a prompt in one shard
                     shard     0 0 1 1 0 0 │ 0 0

Without training, shards take whole batches in turn: a pass has the same samples for any S. The
plan's B is then that of S passes, of which each shard has one block. ::

    S = 3, B = 6     position  0 1 2 3 4 5 │ 6 7 8 9 10 11
                     shard     0 0 1 1 2 2 │ 0 0 1 1  2  2
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

NUM_SEEDS = 1 << 64  # of torch's generators
_INT32 = (1 << 31) - 1
_AT_ONCE = 1 << 20  # indices
ENDLESS = 1 << 62
"""The number of samples of a stream without a length: one epoch is the whole run."""


class Cuts(Protocol):
    """Where a batch sampler cuts the order of each epoch into batches."""

    def starts(self, epoch: int) -> torch.Tensor:
        """Return the position where each batch begins, and the end of the last; int64."""

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How a dataset is cut into global batches and shards. Pure arithmetic.

    If a batch sampler cuts epochs, a plan is that of one epoch; see :meth:`at`.
    """

    # N, of one epoch, at least 1: the dataset's length, or the sampler's, in epoch 0
    num_samples: int
    # B, samples of one global batch, at least S; for a batch sampler the mean in epoch 0
    batch_size: int
    shards: int  # S
    shuffle: bool = True  # whether each epoch has a different order
    seed: int = 0  # the run's
    sampler: str | None = None  # the name of the sampler that defines the order, if there is one
    # its order: maps an epoch to N indices, which may repeat
    order_of: Callable[[int], torch.Tensor] | None = field(default=None, compare=False, repr=False)
    in_blocks: bool = False  # whether a shard's part of a batch is contiguous
    groups: int = 1  # how many neighbours in the order stay together in a shard
    cuts: Cuts | None = field(default=None, compare=False, repr=False)  # of a batch sampler
    epoch: int = field(default=0, compare=False, repr=False)  # whose cuts `starts` are
    starts: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"`shards` must be at least 1, but is {self.shards}.")
        if self.num_samples < 1:
            raise ValueError(
                "the dataset must have at least one sample, but is empty: check its folder or "
                "the filter that made it."
            )
        if self.cuts is not None:
            return
        if self.batch_size < self.shards:
            raise ValueError(
                f"`batch_size` is the global batch and must be at least `shards` "
                f"({self.shards}), but is {self.batch_size}: pass `batch_size={self.shards}` or "
                f"more, even for a dataset with fewer samples, or "
                f"`shards={max(1, self.batch_size)}`."
            )
        if self.batch_size % self.groups or self.batch_size < self.shards * self.groups:
            fitting = self.groups * max(self.shards, round(self.batch_size / self.groups))
            raise ValueError(
                f"`batch_size` must consist of whole groups of {self.groups}, at least one for "
                f"each of {self.shards} shards, but is {self.batch_size}: pass "
                f"`batch_size={fitting}`."
            )

    @property
    def is_endless(self) -> bool:
        """Whether the number of samples is unknown."""
        return self.num_samples == ENDLESS

    @property
    def pass_size(self) -> int:
        """Number of samples of a pass, if shards take blocks; the last one may have fewer."""
        return self.batch_size // self.shards

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in an epoch, including a short last one."""
        if self.starts is None or self.is_endless:
            return -(-self.num_samples // self.batch_size)
        return -(-(len(self.starts) - 1) // (self.shards if self.in_blocks else 1))

    def at(self, epoch: int) -> SamplePlan:
        """Return the plan of an epoch, which differs between epochs cut by a batch sampler."""
        if self.cuts is None or (self.starts is not None and self.epoch == epoch):
            return self
        return replace(self, epoch=epoch, starts=self.cuts.starts(epoch))

    def steps_between(self, start: int, stop: int) -> int:
        """Return the number of steps from the first of epoch `start` to that of epoch `stop`."""
        if self.cuts is None:
            return (stop - start) * self.steps_per_epoch
        if stop < start:
            return -self.steps_between(stop, start)
        return sum(self.cuts.num_batches(epoch) for epoch in range(start, stop))

    @property
    def is_drawn(self) -> bool:
        """Whether the order is drawn here, not by a sampler."""
        return self.shuffle and self.order_of is None and not self.is_endless

    @property
    def order_dtype(self) -> torch.dtype:
        """The dtype of an order that is drawn; torch draws the same numbers in both."""
        return torch.int32 if self.num_samples <= _INT32 else torch.int64

    def order(self, epoch: int, into: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the dataset's indices in the order of `epoch`, of shape (num_samples,).

        None if it is the order of the dataset or the stream; `into`: where to draw it.
        """
        if not self.is_drawn:
            return None if self.order_of is None else self.order_of(epoch)
        generator = torch.Generator()  # on the host, for any default device of torch
        generator.manual_seed((self.seed + epoch) % NUM_SEEDS)
        return torch.randperm(
            self.num_samples,
            generator=generator,
            device=generator.device,
            dtype=self.order_dtype,
            out=into,
        )

    def repeats(self, epoch: int) -> torch.Tensor | None:
        """Return how often each sample appears earlier in the order; None if none repeats."""
        if self.order_of is None:
            return None
        order = self.order_of(epoch)
        if _are_distinct(order):
            return None
        # order: 7 3 7 7 → sorted: 3 7 7 7, runs begin at 0 1 1 1 → in the run: 0 0 1 2 → 0 0 1 2
        ascending, places = torch.sort(order, stable=True)
        _, lengths = torch.unique_consecutive(ascending, return_counts=True)
        if len(lengths) == len(order):
            return None
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        repeats = torch.empty_like(places)
        repeats[places] = torch.arange(len(order), device=order.device) - begins
        return repeats

    def digest(self, epoch: int, num_samples: int | None = None) -> str:
        """Return a hash of a sampler's order in an epoch; empty without a sampler.

        `num_samples`: hash only the first ones; None: hash all, and where they are cut.
        """
        if self.order_of is None:
            return ""
        told, parts = hashlib.blake2b(digest_size=16), [self.order_of(epoch)[:num_samples]]
        if self.cuts is not None:
            starts = self.cuts.starts(epoch)
            parts.append(starts if num_samples is None else starts[starts <= num_samples])
        for part in parts:
            told.update(part.numpy().data)
        return told.hexdigest()

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the positions [start, stop) of the epoch's `batch`-th global batch."""
        if self.starts is None:
            start = batch * self.batch_size
            return start, min(start + self.batch_size, self.num_samples)
        each = self.shards if self.in_blocks else 1
        return self._start(batch * each), self._start((batch + 1) * each)

    def first_position(self, batch: int, shard: int) -> int:
        """Return the first position at or after the batch's start that belongs to `shard`."""
        if self.in_blocks:
            return self._pass_bounds(batch * self.shards + shard)[0]
        start, _ = self.bounds(batch)
        return start + self._turn(start, shard) * self.groups

    def _start(self, number: int) -> int:
        """Return where a batch of a batch sampler begins; after the last one, the end."""
        assert self.starts is not None
        return int(self.starts[min(number, len(self.starts) - 1)])

    def _pass_bounds(self, number: int) -> tuple[int, int]:
        if self.starts is None:
            start = number * self.pass_size
            return min(start, self.num_samples), min(start + self.pass_size, self.num_samples)
        return self._start(number), self._start(number + 1)

    def _turn(self, start: int, shard: int) -> int:
        """Return which group of the batch that begins at `start` is the first of a shard."""
        return shard if self.starts is not None else (shard - start // self.groups) % self.shards

    def as_progress(self, batch: int, shard: int) -> tuple[int, int]:
        """Return batch and shard as ``unisono.progress`` counts them: a block is a batch."""
        return (batch * self.shards + shard, 0) if self.in_blocks else (batch, shard)

    def positions(self, shard: int) -> torch.Tensor:
        """Return the positions of an epoch's order that belong to a shard, ascending; int64."""
        if self.starts is None:
            everything = torch.arange(self.num_samples)
            whole, begins = everything // self.pass_size, torch.tensor(0)
        else:
            everything = torch.arange(int(self.starts[-1]))
            whole = torch.searchsorted(self.starts, everything, right=True) - 1
            begins = self.starts[whole]
        turns = whole if self.in_blocks else (everything - begins) // self.groups
        return everything[turns % self.shards == shard]

    def indices(self, epoch: int, shard: int) -> torch.Tensor:
        """Return all indices of an epoch that belong to a shard, in their order; int64."""
        order, positions = self.order(epoch), self.at(epoch).positions(shard)
        return positions if order is None else order[positions].long()

    def passes(self) -> Iterator[torch.Tensor]:
        """Yield the indices of each pass in turn, if shards take blocks; int64."""
        order = self.order(0)
        for number in range(self.steps_per_epoch * self.shards):
            start, stop = self._pass_bounds(number)
            if start < stop:
                yield torch.arange(start, stop) if order is None else order[start:stop].long()

    def shard_positions(self, batch: int, shard: int) -> torch.Tensor:
        """Return the positions that belong to one shard of one global batch, ascending; int64."""
        here = torch.Generator().device  # the host, for any default device of torch
        begin, stop, by = self._range(batch, shard)
        firsts = torch.arange(begin, stop, by, device=here)
        if self.in_blocks or self.groups == 1:
            return firsts
        positions = (firsts[:, None] + torch.arange(self.groups, device=here)).reshape(-1)
        return positions[positions < stop]

    def shard_indices(self, order: torch.Tensor | None, batch: int, shard: int) -> torch.Tensor:
        """Return one shard's indices in the epoch's order: int64 of shape (samples,)."""
        if order is not None and (self.in_blocks or self.groups == 1):
            begin, stop, by = self._range(batch, shard)
            return order[begin:stop:by].long()
        positions = self.shard_positions(batch, shard)
        return positions if order is None else order[positions].long()

    def _range(self, batch: int, shard: int) -> tuple[int, int, int]:
        """Return begin, end and distance of the positions of a shard, or of its groups' firsts."""
        if self.in_blocks:
            return *self._pass_bounds(batch * self.shards + shard), 1
        stop, first = self.bounds(batch)[1], self.first_position(batch, shard)
        return min(first, stop), stop, self.shards * self.groups

    def shard_size(self, batch: int, shard: int) -> int:
        """Return the number of samples in one shard of one global batch."""
        if self.in_blocks:
            start, stop = self._pass_bounds(batch * self.shards + shard)
            return stop - start
        return self._size(self.bounds(batch)[1] - self.first_position(batch, shard))

    def shard_sizes(self, batch: int) -> list[int]:
        """Return the number of samples in each shard of one global batch."""
        if self.in_blocks:
            return [self.shard_size(batch, shard) for shard in range(self.shards)]
        start, stop = self.bounds(batch)
        turns = (self._turn(start, shard) for shard in range(self.shards))
        return [self._size(stop - start - turn * self.groups) for turn in turns]

    def _size(self, num_left: int) -> int:
        """Return a shard's number of samples in a batch with `num_left` from its first one on."""
        rounds, rest = divmod(max(0, num_left), self.shards * self.groups)
        return rounds * self.groups + min(rest, self.groups)

    def num_batch_samples(self, batch: int) -> int:
        """Return the number of samples of one global batch, over all shards."""
        start, stop = self.bounds(batch)
        return stop - start


def _are_distinct(order: torch.Tensor) -> bool:
    """Return whether indices are distinct, if that costs little; False if it would cost much."""
    if not len(order) or (end := int(order.max()) + 1) > 8 * len(order):
        return False
    is_seen = torch.zeros(end, dtype=torch.bool)
    for some in torch.split(order, _AT_ONCE):
        is_seen[some.long()] = True
    return int(is_seen.sum()) == len(order)

"""Which samples: the global batch of each step, and each shard's part of it.

The order of an epoch is torch's: ``DistributedSampler`` seeds a generator with ``seed + epoch``
and permutes. Step *t* takes positions *tB* … *(t+1)B − 1* of the order; the sample at position *p*
belongs to shard *p* mod *S*, which is the sample that ``DistributedSampler`` gives to replica
*p* mod *S*. Nothing is padded: the last batch may be short and a shard of it empty. A sampler may
define the order, and with it the length of an epoch, instead. ::

    S = 3, B = 5     position  0 1 2 3 4 │ 5 6 7 8 9 │ 10 11
                     shard     0 1 2 0 1 │ 2 0 1 2 0 │  1  2      (shard 0 of the last is empty)

Where nothing is trained, shards take whole batches in turn: a pass has the same samples for any S.
The plan's B is then that of S passes, of which each shard has one block. ::

    S = 3, B = 6     position  0 1 2 3 4 5 │ 6 7 8 9 10 11
                     shard     0 0 1 1 2 2 │ 0 0 1 1  2  2
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

NUM_SEEDS = 1 << 64  # of a generator of torch
_INT32 = (1 << 31) - 1
ENDLESS = 1 << 62
"""How many samples a stream has that does not say it: one epoch is the whole run."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How a dataset is cut into global batches and shards. Pure arithmetic."""

    num_samples: int  # N, of one epoch, at least 1: the dataset's length, or the sampler's
    batch_size: int  # B, samples of one global batch, at least S
    shards: int  # S
    shuffle: bool = True  # whether each epoch has another order
    seed: int = 0  # the run's
    sampler: str | None = None  # the name of the sampler that defines the order, if there is one
    # its order: takes an epoch to N indices, which may repeat
    order_of: Callable[[int], torch.Tensor] | None = field(default=None, compare=False, repr=False)
    in_blocks: bool = False  # whether what a shard has of a batch lies together

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"`shards` must be at least 1, but is {self.shards}.")
        if self.num_samples < 1:
            raise ValueError(
                "the dataset must have at least one sample, but is empty: check its folder or "
                "the filter that made it."
            )
        if self.batch_size < self.shards:
            raise ValueError(
                f"`batch_size` is the global batch and must be at least `shards` "
                f"({self.shards}), but is {self.batch_size}: pass `batch_size={self.shards}` or "
                f"more, or `shards={max(1, self.batch_size)}`."
            )

    @property
    def is_endless(self) -> bool:
        """Whether nobody knows how many samples there are."""
        return self.num_samples == ENDLESS

    @property
    def pass_size(self) -> int:
        """How many samples a pass has, where shards take blocks; the last one may have fewer."""
        return self.batch_size // self.shards

    @property
    def steps_per_epoch(self) -> int:
        """How many global batches an epoch has, a short last one included."""
        return -(-self.num_samples // self.batch_size)

    @property
    def is_drawn(self) -> bool:
        """Whether the order is drawn here, and by no sampler."""
        return self.shuffle and self.order_of is None and not self.is_endless

    @property
    def order_dtype(self) -> torch.dtype:
        """Of an order that is drawn; torch draws the same in both."""
        return torch.int32 if self.num_samples <= _INT32 else torch.int64

    def order(self, epoch: int, into: torch.Tensor | None = None) -> torch.Tensor | None:
        """Give the dataset's indices in the order of `epoch`, of shape (num_samples,).

        None if it is the order of the dataset or the stream; `into`: where it is to be drawn.
        """
        if not self.is_drawn:
            return None if self.order_of is None else self.order_of(epoch)
        generator = torch.Generator()  # on the host, whatever torch's default device is
        generator.manual_seed((self.seed + epoch) % NUM_SEEDS)
        return torch.randperm(
            self.num_samples,
            generator=generator,
            device=generator.device,
            dtype=self.order_dtype,
            out=into,
        )

    def repeats(self, epoch: int) -> torch.Tensor | None:
        """Count how often each sample of the order came before in it; None if none repeats."""
        if self.order_of is None:
            return None
        # order: 7 3 7 7 → sorted: 3 7 7 7, runs begin at 0 1 1 1 → in the run: 0 0 1 2 → 0 0 1 2
        order = self.order_of(epoch)
        ascending, places = torch.sort(order, stable=True)
        _, lengths = torch.unique_consecutive(ascending, return_counts=True)
        if len(lengths) == len(order):
            return None
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        repeats = torch.empty_like(order)
        repeats[places] = torch.arange(len(order), device=order.device) - begins
        return repeats

    def digest(self, epoch: int) -> str:
        """Hash the order that a sampler defines for an epoch; empty without a sampler."""
        if self.order_of is None:
            return ""
        indices = self.order_of(epoch).numpy().tobytes()
        return hashlib.blake2b(indices, digest_size=16).hexdigest()

    def bounds(self, batch: int) -> tuple[int, int]:
        """Give the positions [start, stop) of the epoch's `batch`-th global batch."""
        start = batch * self.batch_size
        return start, min(start + self.batch_size, self.num_samples)

    def first_position(self, batch: int, shard: int) -> int:
        """Give the first position at or after the batch's start that belongs to `shard`."""
        start = batch * self.batch_size
        if self.in_blocks:
            return start + shard * self.pass_size
        return start + (shard - start) % self.shards

    def as_progress(self, batch: int, shard: int) -> tuple[int, int]:
        """Give batch and shard as ``unisono.progress`` does, for which a block is a batch."""
        return (batch * self.shards + shard, 0) if self.in_blocks else (batch, shard)

    def positions(self, shard: int) -> torch.Tensor:
        """Give the positions of an epoch's order that belong to a shard, ascending; int64."""
        if not self.in_blocks:
            return torch.arange(min(shard, self.num_samples), self.num_samples, self.shards)
        everything = torch.arange(self.num_samples)
        return everything[everything // self.pass_size % self.shards == shard]

    def indices(self, epoch: int, shard: int) -> torch.Tensor:
        """Give all of an epoch's indices that belong to a shard, in their order; int64."""
        order, positions = self.order(epoch), self.positions(shard)
        return positions if order is None else order[positions].long()

    def shard_indices(self, order: torch.Tensor | None, batch: int, shard: int) -> torch.Tensor:
        """Cut one shard's indices out of the epoch's order: int64 of shape (samples,)."""
        stop, first = self.bounds(batch)[1], self.first_position(batch, shard)
        step = 1 if self.in_blocks else self.shards
        if self.in_blocks:
            stop = min(first + self.pass_size, stop)
        first = min(first, stop)
        if order is None:
            return torch.arange(first, stop, step, device=torch.Generator().device)
        return order[first:stop:step].long()

    def shard_size(self, batch: int, shard: int) -> int:
        """Count the samples of one shard of one global batch."""
        num_left = max(0, self.bounds(batch)[1] - self.first_position(batch, shard))
        if self.in_blocks:
            return min(num_left, self.pass_size)
        return -(-num_left // self.shards)

    def shard_sizes(self, batch: int) -> list[int]:
        """Count the samples of each shard of one global batch."""
        if self.in_blocks:
            return [self.shard_size(batch, shard) for shard in range(self.shards)]
        start, stop = self.bounds(batch)
        size, longer = divmod(stop - start, self.shards)
        # Shards take turns, beginning with the one that has the position `start`.
        return [size + ((shard - start) % self.shards < longer) for shard in range(self.shards)]

    def num_batch_samples(self, batch: int) -> int:
        """Count the samples of one global batch, all shards together."""
        start, stop = self.bounds(batch)
        return stop - start

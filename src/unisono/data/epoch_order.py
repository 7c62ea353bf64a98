"""The order of an epoch's samples, where a sampler says it.

::

    def balanced(epoch, seed):                 # seed is the run's
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.multinomial(weights, 1000, replacement=True, generator=generator)

Every worker and every loader process asks the sampler; they compare hashes. Default generators are
seeded from (seed, epoch) and one thread computes, as the number of threads may change the bits of
sums. So torch's samplers work, too, if they draw from the default generators.

A long order that is drawn without a sampler is there once a host: one worker draws and seals it,
the others map it, and loader processes inherit it.
"""

from __future__ import annotations

import functools
import json
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from unisono.plan.samples import SamplePlan
from unisono.plan.seeds import seed_of
from unisono.runtime.checkpoint.sealed import Sealed
from unisono.runtime.device import array_of, generators_put_back, num_threads, seed_generators
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.team import Team

Indices = np.ndarray[Any, Any]
_PURPOSE = "order of an epoch"
_CHUNK_BYTES = 32 << 20  # whole pages, of whatever size


class EpochOrder:
    """A sampler whose answers are checked; it gives `num_samples` each epoch. Final.

    Raises TypeError for what gives no whole numbers, and ValueError for what cannot be exact.
    """

    def __init__(self, sampler: Sampler, seed: int, dataset_length: int) -> None:
        self._sampler, self._seed, self._dataset_length = sampler, seed, dataset_length
        self.name = getattr(sampler, "__name__", type(sampler).__name__)
        _check_kind(sampler, self.name)
        self.num_samples = 0
        # Two: reading ahead is in the next epoch before the worker is.
        self._order = functools.lru_cache(maxsize=2)(self._work_out)
        self.num_samples = len(self(0))

    def __call__(self, epoch: int) -> torch.Tensor:
        """Give the indices of an epoch: int64 of shape (num_samples,)."""
        return self._order(epoch)

    def _work_out(self, epoch: int) -> torch.Tensor:
        with generators_put_back(), num_threads(1):
            seed_generators(seed_of("sampler", self._seed, epoch))
            indices = _as_array(_ask(self._sampler, epoch, self._seed), self.name)
        self._check(indices, epoch)
        return torch.from_numpy(indices.astype(np.int64))

    def _check(self, indices: Indices, epoch: int) -> None:
        if not len(indices):
            raise ValueError(
                f"`sampler` must give one index at least, but {self.name} gives none for epoch "
                f"{epoch}: look at what it chooses from."
            )
        wrong = indices[(indices < 0) | (indices >= self._dataset_length)]
        if len(wrong):
            raise ValueError(
                f"`sampler` must give indices from 0 to {self._dataset_length - 1}, but "
                f"{self.name} gives {wrong[0]} for epoch {epoch}: the dataset has "
                f"{self._dataset_length} samples."
            )
        if self.num_samples and len(indices) != self.num_samples:
            raise ValueError(
                f"`sampler` must give equally many indices for each epoch, but {self.name} gives "
                f"{self.num_samples} for epoch 0 and {len(indices)} for epoch {epoch}: leave some "
                f"out, or give some twice."
            )


# What programs may pass.
Sampler = Callable[[int, int], Any] | Iterable[int] | EpochOrder


def _check_kind(sampler: object, name: str) -> None:
    if not callable(sampler) and not isinstance(sampler, Iterable):
        raise TypeError(
            f"`sampler` must be a function of (epoch, seed) that gives indices, or one of torch's "
            f"samplers, but is {sampler!r}: pass `lambda epoch, seed: …`."
        )
    if getattr(sampler, "num_replicas", 1) != 1:
        raise ValueError(
            f"`sampler` must give the samples of all workers, as Unisono divides them itself, but "
            f"{name} gives those of one replica: leave it out, the order is the same without it."
        )
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        raise ValueError(
            f"`sampler` must draw from torch's default generator, which is seeded for each epoch, "
            f"but {name} has one of its own, which a resumed run could not go on with: make it "
            f"without `generator`."
        )


def _ask(sampler: Any, epoch: int, seed: int) -> Any:
    if callable(sampler):
        return sampler(epoch, seed)
    if callable(getattr(sampler, "set_epoch", None)):
        sampler.set_epoch(epoch)
    return sampler


def _as_array(said: Any, name: str) -> Indices:
    """Read what a sampler gives, whatever holds the whole numbers."""
    try:
        indices = array_of(said) if isinstance(said, torch.Tensor) else np.asarray(said)
        if not indices.ndim:  # an iterator
            indices = np.array(list(said))
    except (TypeError, ValueError):
        indices = np.array(None)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise TypeError(
            f"`sampler` must give whole numbers in one row: a list, a tensor or an array, but "
            f"{name} gives {said!r:.200}."
        )
    return indices


def order_on_host(plan: SamplePlan, epoch: int, team: Team | None) -> torch.Tensor:
    """Have an order that is drawn without a sampler drawn once on each host. Collective.

    Without a `team` this worker draws it for itself.
    """
    if team is None or team.size == len(team.hosts):
        return _drawn(plan, epoch)[1]
    mine: list[Sealed] = []

    def draw() -> bytes:
        mine[:] = [Sealed.of(_given_back(*_drawn(plan, epoch)))]
        return json.dumps(mine[0].place).encode()

    place = json.loads(team.hear_host_leaders(draw, _PURPOSE)[team.host])
    held = mine[0] if mine else Sealed.open(place)
    order = None
    if held is not None:
        order = torch.from_file(held.path, False, plan.num_samples, dtype=plan.order_dtype)
    team.meet(_PURPOSE)  # all have it open, or cannot have it
    return _drawn(plan, epoch)[1] if order is None else order


def _drawn(plan: SamplePlan, epoch: int) -> tuple[Memory, torch.Tensor]:
    """Draw in large pages: in small ones it takes twice as long, as it goes all over them."""
    memory = Memory.private(plan.num_samples * plan.order_dtype.itemsize)
    with suppress(OSError):
        memory.mapping.madvise(mmap.MADV_HUGEPAGE)
    order = memory.flat(0, plan.num_samples, plan.order_dtype)
    plan.order(epoch, into=order)
    return memory, order


def _given_back(memory: Memory, order: torch.Tensor) -> Iterator[memoryview]:
    """Give an order's bytes in chunks, each of which is gone from memory once it is taken."""
    for start in range(0, order.nbytes, _CHUNK_BYTES):
        num_bytes = min(_CHUNK_BYTES, order.nbytes - start)
        yield memory.view(start, num_bytes)
        memory.mapping.madvise(mmap.MADV_DONTNEED, start, num_bytes)

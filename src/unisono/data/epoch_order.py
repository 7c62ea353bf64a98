"""The order of an epoch's samples, if a sampler defines it.

::

    def balanced(epoch, seed):                 # seed is the run's
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.multinomial(weights, 1000, replacement=True, generator=generator)

Every worker and loader process calls the sampler, and they compare hashes. Default generators, and
those that the sampler holds, are seeded from (seed, epoch), and one thread computes, because the
number of threads may change the bits of sums. So torch's samplers work as well. A batch sampler
returns lists of indices, each a batch; everything said here about samplers holds for it.

A long order that is drawn without a sampler exists once per host: one worker draws and seals it,
the others map it, and loader processes inherit it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, final

import numpy as np
import torch

from unisono.data.sampler_reading import Taken, read_batches, read_samples
from unisono.plan.samples import SamplePlan
from unisono.plan.seeds import seed_of
from unisono.programs.generators import OwnGenerators
from unisono.runtime.checkpoint.sealed import Sealed
from unisono.runtime.device import generators_put_back, num_threads, seed_generators
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.team import Team

LONG = 1 << 22
"""The number of samples in an epoch from which its order costs much memory and time."""
_ENDLESS_FROM = 1 << 24  # samples or batches of an epoch, if no limit is given
_PURPOSE = "order of an epoch"
_CHUNK_BYTES = 32 << 20  # whole pages of any size


@final
class EpochOrder:
    """A sampler, or a batch sampler, whose results are checked.

    A sampler returns `num_samples` indices each epoch; a batch sampler any number. An endless one
    is read for `needed` batches or samples, in one epoch. Samples may be keys, such as strings or
    tuples; they are numbered by their hashes.

    Raises TypeError if the results are not samples, and ValueError if they cannot be exact.
    """

    def __init__(
        self,
        sampler: Sampler,
        seed: int,
        dataset_length: int,
        *,
        in_batches: bool = False,
        needed: int | None = None,
    ) -> None:
        self._sampler, self._seed, self._dataset_length = sampler, seed, dataset_length
        self._argument = "batch_sampler" if in_batches else "sampler"
        self._needed, self._in_batches = needed, in_batches
        self.name = getattr(sampler, "__name__", type(sampler).__name__)
        _check_kind(sampler, self._argument, self.name)
        self._own = OwnGenerators(sampler=sampler)
        self._taken: dict[int, Taken] = {}
        self._num_batches: dict[int, int] = {}
        self._adopted = -1  # the epoch whose order comes from a run
        self.num_samples = 0
        self.num_samples = len(self(0))
        self.is_endless = self._taken[0].is_endless
        self.has_keys = self._taken[0].keys is not None
        self._check_forgets()

    def __call__(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch, of shape (num_samples,); int64 for a sampler."""
        return self._of(epoch).indices

    def starts(self, epoch: int) -> torch.Tensor:
        """Return the position where each batch begins, and the end of the last; int64."""
        return self._of(epoch).starts

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        if epoch not in self._num_batches:
            self._of(epoch)
        return self._num_batches[epoch]

    def keys(self, epoch: int) -> Mapping[int, Any] | None:
        """Return the keys by which to read the dataset, by number; None: read by number."""
        return self._of(epoch).keys

    def state(self, epoch: int) -> dict[str, Any]:
        """Return the order of the current epoch; empty if it is long, endless or of keys."""
        taken = self._taken.get(epoch)
        if taken is None or taken.keys is not None or self.is_endless:
            return {}
        if len(taken.indices) >= LONG:
            return {}
        return {"epoch": epoch, "indices": taken.indices, "starts": taken.starts}

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Use the order of an epoch from a run, whatever the sampler would return now."""
        if not state:
            return
        epoch, taken = int(state["epoch"]), Taken(state["indices"], state["starts"])
        self._check(taken, epoch)
        self._taken, self._adopted = {epoch: taken}, epoch
        self._num_batches[epoch] = len(taken.starts) - 1

    def has_changed(self, epoch: int) -> bool:
        """Return whether the sampler would now return another order than the one from a run."""
        return epoch == self._adopted and not _is_same(self._taken[epoch], self._ask(epoch))

    def _of(self, epoch: int) -> Taken:
        """Return the order of an epoch, asking the sampler once. Few orders are kept.

        Two, because prefetching reaches the next epoch before the worker does; one, if it is long.
        """
        if epoch not in self._taken:
            if len(self._taken) == (1 if self.num_samples >= LONG else 2):
                del self._taken[next(iter(self._taken))]
            self._taken[epoch] = taken = self._ask(epoch)
            self._num_batches[epoch] = len(taken.starts) - 1
        return self._taken[epoch]

    def _ask(self, epoch: int) -> Taken:
        self._own.search()
        word = seed_of("sampler", self._seed, epoch)
        with generators_put_back(), num_threads(1), self._own.put_back():
            seed_generators(word)
            self._own.seed(word)
            said = _said(self._sampler, epoch, self._seed)
            at_most, at_least = self._limits(said)
            read = read_batches if self._in_batches else read_samples
            taken = read(said, at_most, at_least, f"`{self._argument}`", self.name)
        self._check(taken, epoch)
        return taken

    def _limits(self, said: Any) -> tuple[int, int]:
        """Return how much to read of an order that may be endless; all of one that has an end."""
        at_most, at_least = self._needed, self._dataset_length
        if at_most is None:
            at_most, at_least = _ENDLESS_FROM, 100 * at_least
        with suppress(TypeError, NotImplementedError, OverflowError, ValueError):
            at_most = max(at_most, len(said))
        return at_most, at_least

    def _check(self, taken: Taken, epoch: int) -> None:
        named = f"{self.name} returns"
        if not len(taken.indices):
            raise ValueError(
                f"`{self._argument}` must return at least one index, but {named} none for epoch "
                f"{epoch}: check what it chooses from."
            )
        if taken.is_endless and self._needed is None:
            raise ValueError(
                f"`{self._argument}` must come to an end in each epoch, but {named} "
                f"{len(taken.starts) - 1 if self._in_batches else len(taken.indices):,} for epoch "
                f"{epoch} and more: train with `steps=` and without `epochs=`, or let it end."
            )
        empty = torch.where(taken.starts.diff() == 0)[0]
        if len(empty):
            raise ValueError(
                f"`{self._argument}` must return at least one index per batch, but {named} none "
                f"for batch {int(empty[0])} of epoch {epoch}: leave such a batch out."
            )
        if taken.keys is None:
            self._check_indices(taken.indices, epoch)
        if self._in_batches:
            return
        if self.num_samples and len(taken.indices) != self.num_samples:
            raise ValueError(
                f"`sampler` must return the same number of indices for each epoch, but {named} "
                f"{self.num_samples} for epoch 0 and {len(taken.indices)} for epoch {epoch}: "
                f"omit some, or repeat some."
            )

    def _check_indices(self, indices: torch.Tensor, epoch: int) -> None:
        for wrong in (int(indices.min()), int(indices.max())):
            if not 0 <= wrong < self._dataset_length:
                raise ValueError(
                    f"`{self._argument}` must return indices from 0 to {self._dataset_length - 1}, "
                    f"but {self.name} returns {wrong} for epoch {epoch}: the dataset has "
                    f"{self._dataset_length} samples."
                )

    def _check_forgets(self) -> None:
        """Raise ValueError if a sampler's order depends on how often it was called."""
        cannot_change = (list, tuple, range, torch.Tensor, np.ndarray)
        if callable(self._sampler) or isinstance(self._sampler, (*cannot_change, Iterator)):
            return
        if not _is_same(self._taken[0], self._ask(0)):
            raise ValueError(
                f"`{self._argument}` must return the same order when it is called again for the "
                f"same epoch, as in a run that resumes, but {self.name} returns another: let it "
                f"depend only on the epoch, which `set_epoch(epoch)` sets, and on random numbers, "
                f"which are seeded; let it shuffle a copy, and count nothing."
            )


def _is_same(one: Taken, other: Taken) -> bool:
    return torch.equal(one.indices, other.indices) and torch.equal(one.starts, other.starts)


# What programs may pass.
Sampler = Callable[[int, int], Any] | Iterable[Any] | EpochOrder


def _check_kind(sampler: object, argument: str, name: str) -> None:
    of_what = "lists of indices" if argument == "batch_sampler" else "indices"
    if not callable(sampler) and not isinstance(sampler, Iterable):
        raise TypeError(
            f"`{argument}` must be a function of (epoch, seed) that returns {of_what}, or one of "
            f"torch's samplers, but is {sampler!r}: pass `lambda epoch, seed: …`."
        )
    for each in (sampler, getattr(sampler, "sampler", None)):
        if getattr(each, "num_replicas", 1) != 1:
            raise ValueError(
                f"`{argument}` must return the samples of all workers, as Unisono divides them "
                f"itself, but {type(each).__name__} returns those of one replica: leave it out; "
                f"the order is the same without it."
            )
    if argument == "sampler" and isinstance(getattr(sampler, "generator", None), torch.Generator):
        raise ValueError(
            f"`sampler` must draw from torch's default generator, which is seeded for each epoch, "
            f"but {name} has its own, which a resumed run could not restore: create it without "
            f"`generator`."
        )


def _said(sampler: Any, epoch: int, seed: int) -> Any:
    """Return a sampler's result for an epoch, in any of the ways that samplers have."""
    if callable(sampler):
        return sampler(epoch, seed)
    for each in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)
    return sampler


def order_on_host(plan: SamplePlan, epoch: int, team: Team | None) -> torch.Tensor:
    """Return an order drawn once per host, or here if `team` is None. Collective with a team."""
    if team is None or team.size == len(team.hosts):
        return _drawn(plan, epoch)[1]
    mine: list[Sealed] = []

    def draw() -> bytes:
        mine[:] = [Sealed.of(_given_back(*_drawn(plan, epoch)))]
        return json.dumps(mine[0].place).encode()

    place = json.loads(team.gather_from_host_leaders(draw, _PURPOSE)[team.host])
    held = mine[0] if mine else Sealed.open(place)
    order = None
    if held is not None:
        order = torch.from_file(held.path, False, plan.num_samples, dtype=plan.order_dtype)
    team.meet(_PURPOSE)  # all have opened it, or cannot
    return _drawn(plan, epoch)[1] if order is None else order


def _drawn(plan: SamplePlan, epoch: int) -> tuple[Memory, torch.Tensor]:
    """Draw an order in huge pages: it touches all of them, and small ones take twice as long."""
    memory = Memory.private(plan.num_samples * plan.order_dtype.itemsize)
    with suppress(OSError):
        memory.mapping.madvise(mmap.MADV_HUGEPAGE)
    order = memory.flat(0, plan.num_samples, plan.order_dtype)
    plan.order(epoch, into=order)
    return memory, order


def _given_back(memory: Memory, order: torch.Tensor) -> Iterator[memoryview]:
    """Yield an order's bytes in chunks; each chunk's memory is released once it is consumed."""
    for start in range(0, order.nbytes, _CHUNK_BYTES):
        num_bytes = min(_CHUNK_BYTES, order.nbytes - start)
        yield memory.view(start, num_bytes)
        memory.mapping.madvise(mmap.MADV_DONTNEED, start, num_bytes)


@final
class KeptOrder:
    """The order of the current epoch, as an object with a state.

    `epoch` returns its number. A sampler may depend on what training has changed since then.
    """

    def __init__(self, order: EpochOrder, epoch: Callable[[], int]) -> None:
        self._order, self._epoch = order, epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the order; empty before the sampler was called."""
        return self._order.state(self._epoch())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the order with which the epoch began."""
        self._order.adopt(state)

"""In which order does a run take the samples, and do all workers mean the same one?

Without a sampler the order follows from the plan. One that a sampler says is compared by its hash:
between the workers when an epoch begins, and with the one that the epoch has begun in when a run
goes on in the midst of it.
"""

from __future__ import annotations

from typing import Any

from unisono.data.data_reading import Reading
from unisono.data.epoch_order import EpochOrder, Sampler
from unisono.data.fingerprint import Fingerprint, fingerprint_of_data
from unisono.data.length import is_stream, length_of
from unisono.errors import MismatchError
from unisono.plan.samples import ENDLESS, SamplePlan
from unisono.plan.shards import default_shards
from unisono.train.loop_plan import LoopPlan
from unisono.train.run_context import RunContext
from unisono.whole import check_whole


def plan_samples(
    reading: Reading, shards: int | None, seed: int, *, may_be_endless: bool = False
) -> SamplePlan:
    """Plan which samples are computed where.

    Args:
        shards: S; None: what follows from the batch size.

    Raises:
        TypeError: the dataset has no samples or no length, or `batch_size` is not whole.
        ValueError: a number does not fit, or two say the order.
    """
    dataset, shuffle, sampler = reading.dataset, reading.shuffle, reading.sampler
    batch_size = check_whole("batch_size", reading.batch_size, at_least=1)
    shards = default_shards(batch_size) if shards is None else shards
    length = length_of(dataset)
    if length == ENDLESS and not may_be_endless:
        raise TypeError(
            f"the dataset must have a length where epochs are counted or every sample is to come "
            f"once, but {type(dataset).__name__} is an IterableDataset without `__len__`: train "
            f"with `steps=` alone, give it a `__len__` that says how many samples it gives each "
            f"time, or read it into a list."
        )
    if is_stream(dataset):
        _check_order_is_its_own(dataset, shuffle, sampler)
        shuffle = False
    if sampler is None or not length:
        shuffle = shuffle is None or bool(shuffle)
        return SamplePlan(length, batch_size, shards, shuffle, seed)
    if shuffle:
        raise ValueError(
            "`shuffle` must be left out where a `sampler` says the order, but is "
            f"{shuffle!r}: let the sampler shuffle."
        )
    order = sampler if isinstance(sampler, EpochOrder) else EpochOrder(sampler, seed, length)
    return SamplePlan(order.num_samples, batch_size, shards, False, seed, order.name, order)


def no_epochs(name: str) -> ValueError:
    """Refuse an interval in epochs for a stream that does not say how many samples it has."""
    return ValueError(
        f"`{name}` must be in steps where the dataset has no length, as then no epoch ends, but is "
        f"in epochs: say a number of steps, or give the dataset a `__len__`."
    )


def samples_seen(run: RunContext, plan: LoopPlan) -> Fingerprint:
    """Look at a few samples of the loop's data set, as epoch 0 has them; once a loop."""
    if run.seen is None or run.seen[0] != run.num_loops:
        reading = plan.reading
        seen = fingerprint_of_data(
            reading.dataset,
            length_of(reading.dataset),
            seed=plan.samples.seed,
            stream="train",
            epoch=0,
            in_fork=reading.loader_workers > 0,
        )
        run.seen = run.num_loops, seen
    return run.seen[1]


def facts_of_order(samples: SamplePlan, epoch: int) -> dict[str, str]:
    """Tell the order that a sampler says for an epoch apart from others; empty without one."""
    if samples.sampler is None:
        return {}
    return {f"the sampler's order of epoch {epoch}": samples.digest(epoch)}


def check_order(run: RunContext, samples: SamplePlan) -> None:
    """Refuse to go on in the midst of an epoch in another order than it has begun in.

    Raises:
        MismatchError: the sampler says another.
    """
    position = run.kept.position
    order = facts_of_order(samples, position.epoch)
    if order and position.batch and run.kept.last.get("order", order) != order:
        raise MismatchError(
            f"`sampler` must give the order again in which epoch {position.epoch} has begun, but "
            f"{samples.sampler} gives another: give it what it was given, or begin anew with "
            f'`resume="never"`.'
        )


def begin_epoch(run: RunContext, samples: SamplePlan, *, is_agreed: bool) -> None:
    """Begin the epoch of the next step. Collective, unless its order is agreed on.

    Raises:
        MismatchError: the workers' samplers say different orders.
    """
    order = facts_of_order(samples, run.kept.position.epoch)
    if order:
        if not is_agreed:
            run.team.agree(order, "order of an epoch")
        run.kept.last["order"] = order


def _check_order_is_its_own(dataset: Any, shuffle: bool | None, sampler: Sampler | None) -> None:
    given = "`sampler`" if sampler is not None else "`shuffle`" if shuffle else None
    if given is not None:
        raise ValueError(
            f"{given} must be left out for an IterableDataset, which has an order of its own, but "
            f"is given: let {type(dataset).__name__} shuffle, or give it `__getitem__`."
        )

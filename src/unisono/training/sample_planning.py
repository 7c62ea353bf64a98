"""Which samples a loop reads, and in which batches: a plan from what the program passes."""

import torch

from unisono.data.data_reading import Reading, is_stream, length_of
from unisono.data.epoch_order import EpochOrder, Sampler
from unisono.plan.samples import ENDLESS, SamplePlan
from unisono.plan.shards import default_shards
from unisono.runtime.whole import check_whole


def plan_samples(
    reading: Reading,
    shards: int | None,
    seed: int,
    steps: int | None = None,
    *,
    may_be_endless: bool = False,
) -> SamplePlan:
    """Return which samples are computed where; S may follow from the batch size.

    `steps`: how many steps to read from a sampler that may be endless.
    """
    dataset, shuffle, sampler = reading.dataset, reading.shuffle, reading.sampler
    if reading.batch_sampler is not None:
        return _cut_plan(reading, reading.batch_sampler, shards, seed, steps)
    batch_size, groups = check_whole("batch_size", reading.batch_size, at_least=1), reading.groups
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
        if sampler is not None or shuffle:
            given = "`shuffle`" if sampler is None else "`sampler`"
            raise ValueError(
                f"{given} must be left out for an IterableDataset, which has its own order, "
                f"but is given: let {type(dataset).__name__} shuffle, or give it `__getitem__`."
            )
        shuffle = False
    if sampler is None or not length:
        shuffle = shuffle is None or bool(shuffle)
        return SamplePlan(length, batch_size, shards, shuffle, seed, groups=groups)
    if shuffle:
        raise ValueError(
            "`shuffle` must be left out where a `sampler` says the order, but is "
            f"{shuffle!r}: let the sampler shuffle."
        )
    needed = None if steps is None else steps * batch_size
    order = sampler
    if not isinstance(order, EpochOrder):
        order = EpochOrder(sampler, seed, length, needed=needed)
    num_samples = ENDLESS if order.is_endless else order.num_samples
    return SamplePlan(
        num_samples, batch_size, shards, False, seed, order.name, order, groups=groups
    )


def _cut_plan(
    reading: Reading, batch_sampler: Sampler, shards: int | None, seed: int, steps: int | None
) -> SamplePlan:
    """Return the plan for the batches of a batch sampler."""
    length = length_of(reading.dataset)
    if is_stream(reading.dataset) or not length:
        raise ValueError(
            "a `batch_sampler` must be left out where samples have no numbers, as those of an "
            "IterableDataset, or where there are none: let the dataset yield whole batches, or "
            "give it `__getitem__` and `__len__`."
        )
    order = EpochOrder(batch_sampler, seed, length, in_batches=True, needed=steps)
    starts = order.starts(0)
    # The mean over one dataset's length, which is read in any case.
    most = starts[: int((starts <= max(length, int(starts[1]))).sum())]
    mean_size = int(most[-1]) // (len(most) - 1)
    return SamplePlan(
        ENDLESS if order.is_endless else order.num_samples,
        mean_size,
        default_shards(mean_size) if shards is None else shards,
        False,
        seed,
        order.name,
        order,
        groups=reading.groups,
        cuts=order,
        starts=starts,
    )


def check_covers(plan: SamplePlan, length: int) -> None:
    """Raise ValueError if batches of an evaluation omit samples, or repeat some."""
    order = plan.order(0)
    assert order is not None
    counts = torch.bincount(order.clamp(max=length), minlength=length)
    wrong = torch.where(counts[:length] != 1)[0]
    if len(wrong) or len(counts) > length:
        where = f"takes sample {int(wrong[0])} {int(counts[wrong[0]])} times"
        raise ValueError(
            f"evaluation must go over every sample of a dataset once, by its number, but the "
            f"batch sampler {plan.sampler} {where}: let it return each once, or select the "
            f"samples with `torch.utils.data.Subset`."
        )


def no_epochs(name: str) -> ValueError:
    """Return the error for an interval in epochs if a stream has no length."""
    return ValueError(
        f"`{name}` must be in steps where the dataset has no length, as then no epoch ends, but is "
        f"in epochs: count steps, or give the dataset a `__len__`."
    )

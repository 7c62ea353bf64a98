"""Who computes what: each worker a contiguous range of shards.

Sizes differ by at most one, unless devices of different models compute together: then a faster one
gets more.
"""

from __future__ import annotations

from collections.abc import Sequence

_DEFAULT_AT_MOST, _SAMPLES_AT_LEAST = 8, 8


def default_shards(batch_size: int) -> int:
    """Choose S where the program does not: from the global batch alone, whatever the machine.

    Returns:
        The largest power of two, at most 8, that leaves 8 samples a shard; at least 1.
    """
    most = min(_DEFAULT_AT_MOST, batch_size // _SAMPLES_AT_LEAST)
    return 1 << max(most, 1).bit_length() - 1


def assign(
    num_shards: int,
    num_workers: int,
    speeds: Sequence[float] | None = None,
    *,
    because: str = "",
) -> list[range]:
    """Divide shards among workers, so that the last one to be done is done as early as can be.

    Args:
        num_shards: S, the fixed number of parts of every global batch.
        num_workers: W, those alive now, at most S.
        speeds: of each worker, in rank order, in shards a second or any other unit; None: equal.
        because: why there are so many shards, for the error.

    Returns:
        One range a worker, in rank order, each with at least one shard; together they are
        0 … S − 1. Of workers with equal speeds the first ones get the longer ranges.

    Raises:
        ValueError: there are fewer shards than workers, or no worker, or a speed is not above 0.
    """
    if num_workers < 1:
        raise ValueError(f"the number of workers must be at least 1, but is {num_workers}.")
    if num_shards < num_workers:
        raise ValueError(
            f"`shards` must be at least the number of workers ({num_workers}), but is "
            f"{num_shards}{because}: pass `shards={num_workers}` or start fewer workers."
        )
    if speeds is None:
        size, longer = divmod(num_shards, num_workers)
        sizes = [size + (rank < longer) for rank in range(num_workers)]
    else:
        sizes = _by_speed(num_shards, num_workers, speeds)
    starts = [sum(sizes[:rank]) for rank in range(num_workers + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(num_workers)]


def _by_speed(num_shards: int, num_workers: int, speeds: Sequence[float]) -> list[int]:
    """Count shards: one each, then one after the other to whoever would be done with it first."""
    if len(speeds) != num_workers or not all(0 < speed < float("inf") for speed in speeds):
        raise ValueError(
            f"`speeds` must be a finite number above 0 for each of {num_workers} workers, but are "
            f"{list(speeds)}."
        )
    sizes = [1] * num_workers
    for _ in range(num_shards - num_workers):
        done_at = [(size + 1) / speed for size, speed in zip(sizes, speeds, strict=True)]
        sizes[done_at.index(min(done_at))] += 1
    return sizes


Held = dict[int, list[range]]


def take_over(held: Held, ranks: Sequence[int]) -> tuple[Held, Held]:
    """Divide the shards of workers that were lost in the midst of a step among those left.

    What the others have computed stays theirs, run by run, so that no sum that is already there
    changes.

    Args:
        held: by rank, the runs of shards that each worker computes in this step.
        ranks: those who are left, ascending.

    Returns:
        The same for those who are left, and what of it is new.
    """
    lost = sorted(
        shard for rank, runs in held.items() if rank not in ranks for run in runs for shard in run
    )
    new: Held = {}
    for position, rank in enumerate(ranks):
        first, last = (len(lost) * part // len(ranks) for part in (position, position + 1))
        new[rank] = _runs_of(lost[first:last])
    return {rank: [*held.get(rank, []), *new[rank]] for rank in ranks}, new


def _runs_of(shards: Sequence[int]) -> list[range]:
    """Join neighbours.

    Args:
        shards: ascending.
    """
    runs: list[range] = []
    for shard in shards:
        if runs and runs[-1].stop == shard:
            runs[-1] = range(runs[-1].start, shard + 1)
        else:
            runs.append(range(shard, shard + 1))
    return runs

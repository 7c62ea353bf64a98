"""Who computes what: each worker a contiguous range of shards, sizes differing by at most one."""

from __future__ import annotations


def assign(num_shards: int, num_workers: int) -> list[range]:
    """Divide shards among workers.

    Args:
        num_shards: S, the fixed number of parts of every global batch.
        num_workers: W, those alive now, at most S.

    Returns:
        One range a worker, in rank order; together they are 0 … S − 1. The first ones are longer
        where S is no multiple of W.

    Raises:
        ValueError: there are fewer shards than workers, or no worker.
    """
    if num_workers < 1:
        raise ValueError(f"the number of workers must be at least 1, but is {num_workers}.")
    if num_shards < num_workers:
        raise ValueError(
            f"`shards` must be at least the number of workers ({num_workers}), but is "
            f"{num_shards}: pass `shards={num_workers}` or start fewer workers."
        )
    size, longer = divmod(num_shards, num_workers)
    starts = [rank * size + min(rank, longer) for rank in range(num_workers + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(num_workers)]

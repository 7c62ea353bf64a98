"""How many parts does each host add up, and which number of shards makes it one?

Each host adds up the maximal sub-trees inside of its shards; these parts cross the network::

    8 shards on 2 hosts     [0, 4) │ [4, 8)                  one part a host
    6 shards on 2 hosts     [0, 2) 2 │ 3 [4, 6)              two

With k parts a host sends (k + 1) / 2 times the bytes of a ring all-reduce over the hosts. With one,
it is the ring's.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plan.shards import assign
from unisono.plan.summation import parts_of

_TIMES_AS_MANY = 4


def parts_of_hosts(num_shards: int, workers: Sequence[int]) -> list[int]:
    """Count the parts of each host.

    Args:
        num_shards: S.
        workers: how many each host has.
    """
    ranges = assign(num_shards, sum(workers))
    counts, first = [], 0
    for number in workers:
        own = range(ranges[first].start, ranges[first + number - 1].stop)
        counts.append(len(parts_of(own, num_shards)))
        first += number
    return counts


def shards_for_hosts(num_shards: int, workers: Sequence[int]) -> int | None:
    """Find the number of shards nearest to S with which each host has one part.

    Each worker has equally many of them.

    Args:
        num_shards: S.
        workers: how many each host has.

    Returns:
        None if no number of shards makes it so.
    """
    total = sum(workers)
    candidates = range(total, _TIMES_AS_MANY * num_shards + 1, total)
    fit = [one for one in candidates if set(parts_of_hosts(one, workers)) == {1}]
    return min(fit, key=lambda one: (abs(one - num_shards), -one), default=None)

"""How is a step divided among N workers? As `plan/` divides it; beyond S workers the batch grows.

::

    N ≤ S, batch stays     the same run: S shards, the same bits
    N > S, or it grows     N workers × the shards and samples that one of them has: other results
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from unisono.forecast.step_profile import StepProfile
from unisono.plan.shards import assign
from unisono.plan.summation import parts_of


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step of N workers consists of.

    Attributes:
        num_workers: N.
        num_shards: S.
        batch_size: samples of the step.
        on_hosts: how many workers each host has, the fullest first.
        sizes: pairs of a number of shards and how many workers have it, the largest first.
        sizes_here: the same of the fullest host.
        parts_of_host: sub-trees that a host's shards consist of, at most.
        parts_here: those of all workers of the fullest host.
        is_same_run: whether batch and shards are those that were measured.
    """

    num_workers: int
    num_shards: int
    batch_size: int
    on_hosts: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    sizes_here: tuple[tuple[int, int], ...]
    parts_of_host: int
    parts_here: int
    is_same_run: bool

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.on_hosts)

    @property
    def most_shards(self) -> int:
        """Those of the worker that has the most."""
        return self.sizes[0][0]


def divide_work(
    profile: StepProfile, num_workers: int, on_hosts: Sequence[int], *, grows: bool = False
) -> Workload:
    """Divide a step.

    Args:
        profile: says what batch and shards were measured.
        num_workers: N.
        on_hosts: how many of them each host has.
        grows: whether each worker keeps the batch and shards of one worker.
    """
    shards, batch = profile.num_shards, profile.batch_size
    is_same_run = (num_workers == 1 or not grows) and num_workers <= shards
    if not is_same_run:
        each = shards if grows else 1
        batch = max(1, round(batch * each / shards)) * num_workers
        shards = each * num_workers
    ranges = assign(shards, num_workers)
    ends = [0, *accumulate(on_hosts)]
    hosts = [ranges[first:last] for first, last in pairwise(ends)]
    of_hosts = [len(parts_of(range(own[0].start, own[-1].stop), shards)) for own in hosts]
    return Workload(
        num_workers,
        shards,
        batch,
        tuple(on_hosts),
        _sizes(ranges),
        _sizes(hosts[0]),
        max(of_hosts),
        sum(len(parts_of(one, shards)) for one in hosts[0]),
        is_same_run,
    )


def num_parts(num_shards: int, num_workers: int) -> int:
    """Count the sub-trees that the shards of all workers consist of."""
    return sum(len(parts_of(own, num_shards)) for own in assign(num_shards, num_workers))


def _sizes(ranges: Sequence[range]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(Counter(map(len, ranges)).items(), reverse=True))

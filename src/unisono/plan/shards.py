"""Who computes what: each worker a contiguous range of shards; sizes differ by at most one.

Who updates what: every parameter cut into pieces, each worker a contiguous run of them. Cuts lie at
multiples of 1,024 elements from a parameter's start, so that every element keeps its place in the
kernels' vectors and a piece computes the bits that the whole would.

How many parts each host adds up, the maximal sub-trees inside of its shards, which cross the
network::

    8 shards on 2 hosts     [0, 4) │ [4, 8)                  one part a host
    6 shards on 2 hosts     [0, 2) 2 │ 3 [4, 6)              two

With k parts a host sends (k + 1) / 2 times the bytes of a ring all-reduce over the hosts. With one,
it is the ring's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.plan.summation import parts_of

_DEFAULT_AT_MOST, _SAMPLES_AT_LEAST = 8, 8


def default_shards(batch_size: int) -> int:
    """Choose S where the program does not: the largest power of two that leaves 8 samples a shard.

    From the global batch alone, whatever the machine; at least 1, at most 8.
    """
    most = min(_DEFAULT_AT_MOST, batch_size // _SAMPLES_AT_LEAST)
    return 1 << max(most, 1).bit_length() - 1


def assign(
    num_shards: int,
    num_workers: int,
    *,
    because: str = "",
) -> list[range]:
    """Divide shards among the workers that are alive: one range each, the first ones longer.

    Raises ValueError if there are fewer shards than workers, or no worker.
    """
    if num_workers < 1:
        raise ValueError(f"the number of workers must be at least 1, but is {num_workers}.")
    if num_shards < num_workers:
        raise ValueError(
            f"`shards` must be at least the number of workers ({num_workers}), but is "
            f"{num_shards}{because}: pass `shards={num_workers}` or start fewer workers."
        )
    size, longer = divmod(num_shards, num_workers)
    sizes = [size + (rank < longer) for rank in range(num_workers)]
    starts = [sum(sizes[:rank]) for rank in range(num_workers + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(num_workers)]


Held = dict[int, list[range]]


def take_over(held: Held, ranks: Sequence[int]) -> tuple[Held, Held]:
    """Divide the shards of workers that were lost in the midst of a step among `ranks`, ascending.

    What the others have computed stays theirs, run by run, so that no sum that is already there
    changes. `held`: by rank, the runs of shards that each computes. Gives that for those who are
    left, and what of it is new.
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
    """Join neighbours."""
    runs: list[range] = []
    for shard in shards:
        if runs and runs[-1].stop == shard:
            runs[-1] = range(runs[-1].start, shard + 1)
        else:
            runs.append(range(shard, shard + 1))
    return runs


CUT_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` … `stop` − 1 (in memory order) of the tensor at position `index`."""

    index: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether the tensor begins here; the worker of its first piece speaks for it."""
        return self.start == 0


def cut(numels: Sequence[int], num_workers: int) -> list[list[Piece]]:
    """Divide tensors among workers so that each gets about the same number of elements.

    One list of pieces a worker, in rank order; together they are every tensor once. A tensor
    without elements goes to one worker as an empty piece.
    """
    total = sum(numels)
    pieces: list[list[Piece]] = [[] for _ in range(num_workers)]
    before = 0
    for index, numel in enumerate(numels):
        start = 0
        while start < numel or (start == 0 and numel == 0):
            worker = min(num_workers - 1, (before + start) * num_workers // max(1, total))
            share_ends = -(-(worker + 1) * total // num_workers) - before
            stop = -(-share_ends // CUT_ELEMENTS) * CUT_ELEMENTS
            stop = numel if worker == num_workers - 1 else min(numel, max(stop, start + 1))
            pieces[worker].append(Piece(index, start, stop))
            if stop == numel:
                break
            start = stop
        before += numel
    return pieces


def parts_of_hosts(num_shards: int, workers: Sequence[int]) -> list[int]:
    """Count the parts of each host."""
    ranges = assign(num_shards, sum(workers))
    counts, first = [], 0
    for number in workers:
        own = range(ranges[first].start, ranges[first + number - 1].stop)
        counts.append(len(parts_of(own, num_shards)))
        first += number
    return counts

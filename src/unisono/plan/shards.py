"""Who computes what: each worker a contiguous range of shards; sizes differ by at most one.

Who updates what: every parameter is cut into pieces, and each worker has contiguous pieces. Cuts
are at multiples of 1,024 elements from a parameter's start, so that every element keeps its place
in the kernels' vectors and a piece gets the bits that it would get in the whole parameter.

How many parts each host adds up: the maximal sub-trees inside its shards, whose sums cross the
network::

    8 shards on 2 hosts     [0, 4) │ [4, 8)                  one part per host
    6 shards on 2 hosts     [0, 2) 2 │ 3 [4, 6)              two

With k parts a host sends (k + 1) / 2 times the bytes of a ring all-reduce over the hosts, so with
one part as much as the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.plan.summation import parts_of

_DEFAULT_AT_MOST, _SAMPLES_AT_LEAST = 8, 8


def default_shards(batch_size: int) -> int:
    """Return the default S: the largest power of two that leaves 8 samples for each shard.

    It depends only on the global batch, not on the machine; at least 1, at most 8.
    """
    most = min(_DEFAULT_AT_MOST, batch_size // _SAMPLES_AT_LEAST)
    return 1 << max(most, 1).bit_length() - 1


def assign(num_shards: int, num_workers: int, *, because: str = "") -> list[range]:
    """Divide shards among workers, one range each, the first ones longer, or raise ValueError."""
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
    """Divide the shards of workers lost during a step among `ranks`, which ascend.

    The others keep what they have computed, run by run, so that existing sums do not change.
    `held`: by rank, the runs of shards that it computes. Return that for the remaining ranks, and
    the new part of it.
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
    """Return consecutive shards as ranges."""
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
        """Whether the tensor begins here; the worker of its first piece acts for the tensor."""
        return self.start == 0


def cut(numels: Sequence[int], num_workers: int) -> list[list[Piece]]:
    """Divide tensors among workers so that each gets about the same number of elements.

    Return one list of pieces per worker, in rank order; together they cover every tensor once. A
    tensor without elements goes to one worker as an empty piece.
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
    """Return the number of parts of each host."""
    ranges = assign(num_shards, sum(workers))
    counts, first = [], 0
    for number in workers:
        own = range(ranges[first].start, ranges[first + number - 1].stop)
        counts.append(len(parts_of(own, num_shards)))
        first += number
    return counts

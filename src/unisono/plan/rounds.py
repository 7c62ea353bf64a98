"""Which of a worker's shards does each of its devices compute, and in which order?

Each device has a contiguous range, as each worker has. Devices compute at the same time, so the
worker takes the shards round by round, one of each device::

    shards 0 … 4          round 0   round 1   round 2
      device 0               0         1         2
      device 1               3         4
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plan.shards import assign, runs_of
from unisono.plan.summation import Node, parts_of


def divide(shards: Sequence[int], num_devices: int) -> list[list[int]]:
    """Divide a worker's shards among its devices.

    Args:
        shards: ascending.
        num_devices: at least 1; some get nothing where there are fewer shards.

    Returns:
        Those of each device.
    """
    num_busy = min(num_devices, len(shards))
    ranges = assign(len(shards), num_busy) if num_busy else []
    ranges += [range(0)] * (num_devices - num_busy)
    return [[shards[at] for at in own] for own in ranges]


def rounds_of(divided: Sequence[Sequence[int]]) -> list[list[int]]:
    """List the shards of each round, of what :func:`divide` gives."""
    num_rounds = max(map(len, divided), default=0)
    return [[own[at] for own in divided if at < len(own)] for at in range(num_rounds)]


def parts_among(shards: Sequence[int], num_shards: int) -> list[Node]:
    """Find the maximal sub-trees among some shards, from left to right.

    Args:
        shards: ascending.
        num_shards: S.
    """
    return [part for run in runs_of(shards) for part in parts_of(run, num_shards)]


def within(part: Node, others: Sequence[Node]) -> list[Node]:
    """Find those of some sub-trees that are within one, from left to right."""
    return sorted(other for other in others if part.lo <= other.lo and other.hi <= part.hi)


def as_whole(part: Node, others: Sequence[Node]) -> list[Node]:
    """Number the shards of sub-trees within one as if that were the whole tree."""
    return [Node(other.lo - part.lo, other.hi - part.lo) for other in others]

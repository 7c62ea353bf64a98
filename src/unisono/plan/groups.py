"""Which shards are whose group, where links between groups are slow.

What a slow link carries is made of the sum of each group, so groups belong to a run's identity, and
no sum goes over the border of one before it is made smaller. A group is a sub-tree of the order of
summation, and each host computes whole groups, however many workers it has::

    8 shards, 2 groups      [0, 4) │ [4, 8)
    on 1 host, 3 workers    0 1 2 3 4 │ …       a worker may compute shards of both: two parts
    on 2 hosts              host 0 │ host 1
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plan.shards import assign
from unisono.plan.summation import Node, parts_of

_TIMES_AS_MANY = 4


def groups_of(num_shards: int, num_groups: int) -> tuple[Node, ...]:
    """Divide shards into groups of equally many, each a sub-tree.

    Args:
        num_shards: S.
        num_groups: at least 1.

    Raises:
        ValueError: there is no such division; names the nearest number of shards that has one.
    """
    groups = _divided(num_shards, num_groups)
    if groups is None:
        candidates = range(num_groups, _TIMES_AS_MANY * max(num_shards, num_groups) + 1)
        fit = [one for one in candidates if _divided(one, num_groups) is not None]
        nearest = min(fit, key=lambda one: (abs(one - num_shards), -one))
        raise ValueError(
            f"`shards` must be {num_groups} × 2ʲ where a slow link is between {num_groups} groups "
            f"of shards, so that each is one part of the sum, but is {num_shards}: pass "
            f"`shards={nearest}`."
        )
    return groups


def _divided(num_shards: int, num_groups: int) -> tuple[Node, ...] | None:
    if num_shards % num_groups:
        return None
    size = num_shards // num_groups
    parts = [parts_of(range(at, at + size), num_shards) for at in range(0, num_shards, size)]
    return tuple(part for (part,) in parts) if set(map(len, parts)) == {1} else None


def groups_on(groups: Sequence[Node], num_hosts: int) -> list[list[Node]]:
    """Divide groups among hosts, in order; raises ValueError if there are fewer than hosts."""
    if len(groups) < num_hosts:
        raise ValueError(
            f"`groups` of a slow link must be at least the number of hosts ({num_hosts}), as each "
            f"computes whole groups, but is {len(groups)}: pass `groups={num_hosts}`."
        )
    return [[groups[at] for at in own] for own in assign(len(groups), num_hosts)]


def assign_groups(groups: Sequence[Node], workers: Sequence[int]) -> list[range]:
    """Divide shards among workers so that each host computes whole groups.

    Args:
        groups: of all shards.
        workers: how many each host has.

    Returns:
        One range a worker, in rank order, as :func:`unisono.plan.shards.assign` gives them.

    Raises:
        ValueError: a host has more workers than its groups have shards.
    """
    ranges = []
    for own, number in zip(groups_on(groups, len(workers)), workers, strict=True):
        first, num_shards = own[0].lo, own[-1].hi - own[0].lo
        if num_shards < number:
            enough = groups[-1].hi << (-(-number // num_shards) - 1).bit_length()
            raise ValueError(
                f"`shards` must be one for each worker at least, but a host with {number} workers "
                f"has {num_shards} of {groups[-1].hi} in its groups: pass `shards={enough}`, or "
                f"start fewer workers."
            )
        ranges += [range(first + r.start, first + r.stop) for r in assign(num_shards, number)]
    return ranges


def parts_within(shards: range, groups: Sequence[Node], num_shards: int) -> list[Node]:
    """Find the maximal sub-trees inside a range of shards that no border of a group crosses."""
    return [
        part
        for group in groups
        for part in parts_of(
            range(max(shards.start, group.lo), min(shards.stop, group.hi)), num_shards
        )
    ]

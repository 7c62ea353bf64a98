import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.shards import assign
from unisono.plan.summation import Node, additions_after, additions_over, parts_of, tree_sum


def written(lo, hi):
    """The definition, written down once more: T[lo,hi) = T[lo,mid) + T[mid,hi)."""
    if hi - lo == 1:
        return str(lo)
    half = 1
    while half * 2 < hi - lo:
        half *= 2
    return f"({written(lo, lo + half)}+{written(lo + half, hi)})"


def joined(left, right):
    return f"({left}+{right})"


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
    ],
)
def test_the_tree_is_the_designs(shards, expected):
    assert written(0, shards) == expected
    assert tree_sum([str(v) for v in range(shards)], joined) == expected


@pytest.mark.parametrize(
    ("shards", "total", "expected"),
    [
        (range(3), 8, [Node(0, 2), Node(2, 3)]),
        (range(3, 6), 8, [Node(3, 4), Node(4, 6)]),
        (range(6, 8), 8, [Node(6, 8)]),
        (range(8), 8, [Node(0, 8)]),
        (range(1, 3), 3, [Node(1, 2), Node(2, 3)]),
    ],
)
def test_parts_are_the_maximal_sub_trees(shards, total, expected):
    assert parts_of(shards, total) == expected


def computed(shards, workers):
    """Add as the workers do: stacks for the parts, then the rest of the tree over the slots."""
    slots, parts = {}, []
    for mine in assign(shards, workers):
        for part in parts_of(mine, shards):
            stack = []
            for shard, count in zip(range(part.lo, part.hi), additions_after(part), strict=True):
                stack.append(str(shard))
                for _ in range(count):
                    right, left = stack.pop(), stack.pop()
                    stack.append(joined(left, right))
            (slots[part.lo],) = stack
            parts.append(part)
    for into, other in additions_over(parts, shards):
        slots[into] = joined(slots[into], slots[other])
    return slots[0]


@pytest.mark.slow
@given(st.integers(1, 40).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))))
def test_every_placement_makes_the_same_additions(case):
    shards, workers = case
    assert computed(shards, workers) == written(0, shards)

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.definition import sum_by_definition

from unisono.plan.shards import assign
from unisono.plan.summation import Node, additions_after, as_whole, parts_of, tree_sum, within


def written(shards):
    return sum_by_definition([str(shard) for shard in range(shards)], joined)


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
    assert written(shards) == expected
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


def computed(shards, workers, shuffle):
    """Add as the workers do: stacks for the parts, then the rest of the tree over the parts."""
    values = []
    for mine in assign(shards, workers):
        for part in parts_of(mine, shards):
            stack = []
            for shard, count in zip(range(part.lo, part.hi), additions_after(part), strict=True):
                stack.append(str(shard))
                for _ in range(count):
                    right, left = stack.pop(), stack.pop()
                    stack.append(joined(left, right))
            values.append((part, stack))
    shuffle(values)  # the parts of a lost worker's shards come last
    parts, sums = zip(*((part, value) for part, (value,) in values), strict=True)
    return tree_sum(sums, joined, parts)


@pytest.mark.slow
@given(st.integers(1, 40).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))), st.randoms())
def test_every_placement_makes_the_same_additions(case, chance):
    shards, workers = case
    assert computed(shards, workers, chance.shuffle) == written(shards)


def sum_of(node):
    """Add one node's shards: its tree is that of as many shards from 0."""
    return tree_sum([str(shard) for shard in range(node.lo, node.hi)], joined)


@given(
    st.integers(1, 24).flatmap(
        lambda s: st.tuples(st.just(s), st.integers(1, s), st.integers(0, s), st.integers(0, 23))
    )
)
def test_a_part_is_finished_from_the_sub_trees_within_it(drawn):
    shards, workers, cut_at, position = drawn
    own = assign(shards, workers)[position % workers]
    nodes = [*parts_of(own[:cut_at], shards), *parts_of(own[cut_at:], shards)]
    for part in parts_of(own, shards):
        inner = within(part, nodes)
        assert tree_sum(list(map(sum_of, inner)), joined, as_whole(part, inner)) == sum_of(part)


@given(st.integers(1, 200))
def test_one_value_a_shard_is_added_as_defined(shards):
    assert tree_sum([str(shard) for shard in range(shards)], joined) == written(shards)

"""A worker's devices divide its shards as workers divide all of them; no sum changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.rounds import as_whole, divide, parts_among, rounds_of, within
from unisono.plan.shards import assign
from unisono.plan.summation import Node, parts_of, tree_sum

TABLE = [
    # shards, devices → those of each, rounds
    ([0, 1, 2, 3], 1, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    ([0, 1, 2, 3], 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    ([4, 5, 6, 7, 8], 2, [[4, 5, 6], [7, 8]], [[4, 7], [5, 8], [6]]),
    ([4, 5, 6, 7], 3, [[4, 5], [6], [7]], [[4, 6, 7], [5]]),
    ([1, 2, 6], 2, [[1, 2], [6]], [[1, 6], [2]]),  # what a lost worker has left
    ([3], 3, [[3], [], []], [[3]]),
    ([], 2, [[], []], []),
]


@pytest.mark.parametrize(("shards", "devices", "divided", "rounds"), TABLE)
def test_devices_take_shards_round_by_round(shards, devices, divided, rounds):
    assert divide(shards, devices) == divided
    assert rounds_of(divided) == rounds


def test_parts_are_the_maximal_sub_trees_of_neighbours():
    assert parts_among([0, 1, 2], 4) == [Node(0, 2), Node(2, 3)]
    assert parts_among([0, 2, 3], 4) == [Node(0, 1), Node(2, 4)]
    assert parts_among([], 4) == []


def added(left, right):
    return f"({left}+{right})"


def sums_of(parts):
    return [tree_sum([str(v) for v in range(p.lo, p.hi)], added, renumbered(p)) for p in parts]


def renumbered(part):
    return as_whole(part, [Node(v, v + 1) for v in range(part.lo, part.hi)])


@given(
    st.integers(1, 24).flatmap(
        lambda shards: st.tuples(
            st.just(shards), st.integers(1, shards), st.integers(1, 6), st.integers(0, 23)
        )
    )
)
def test_a_worker_with_several_devices_makes_the_additions_of_one_with_one(drawn):
    num_shards, workers, devices, rank = drawn
    own = assign(num_shards, workers)[rank % workers]
    parts = parts_of(own, num_shards)
    nodes = [node for each in divide(own, devices) for node in parts_among(each, num_shards)]
    finished = [
        tree_sum(sums_of(within(part, nodes)), added, as_whole(part, within(part, nodes)))
        for part in parts
    ]
    assert finished == sums_of(parts)
    assert sum(len(within(part, nodes)) for part in parts) == len(nodes)

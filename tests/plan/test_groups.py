import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.groups import assign_groups, groups_of, parts_within
from unisono.plan.summation import Node


@pytest.mark.parametrize(
    ("num_shards", "num_groups", "groups"),
    [
        (2, 2, [(0, 1), (1, 2)]),
        (8, 2, [(0, 4), (4, 8)]),
        (12, 3, [(0, 4), (4, 8), (8, 12)]),
        (8, 8, [(n, n + 1) for n in range(8)]),
    ],
)
def test_groups_are_sub_trees(num_shards, num_groups, groups):
    assert groups_of(num_shards, num_groups) == tuple(Node(*group) for group in groups)


@pytest.mark.parametrize(
    ("num_shards", "num_groups", "better"), [(6, 2, 8), (7, 2, 8), (1, 2, 2), (9, 3, 12)]
)
def test_the_nearest_number_of_shards_that_fits_is_named(num_shards, num_groups, better):
    with pytest.raises(ValueError, match=f"× 2ʲ .*: pass `shards={better}`"):
        groups_of(num_shards, num_groups)


@pytest.mark.parametrize(
    ("workers", "ranges"),
    [
        ([1, 1], [(0, 4), (4, 8)]),
        ([1, 3], [(0, 4), (4, 6), (6, 7), (7, 8)]),
        ([2], [(0, 4), (4, 8)]),
        ([3], [(0, 3), (3, 6), (6, 8)]),
    ],
)
def test_each_host_computes_whole_groups(workers, ranges):
    assert assign_groups(groups_of(8, 2), workers) == [range(*one) for one in ranges]


@pytest.mark.parametrize(
    ("num_groups", "workers", "words"),
    [
        (2, [1, 1, 1], r"`groups` .* number of hosts \(3\), .* but is 2"),
        (2, [1, 5], "host with 5 workers has 4 of 8 in its groups: pass `shards=16`"),
    ],
)
def test_hosts_that_groups_do_not_fit_are_refused(num_groups, workers, words):
    with pytest.raises(ValueError, match=words):
        assign_groups(groups_of(8, num_groups), workers)


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 63), st.integers(0, 63))
def test_no_part_crosses_the_border_of_a_group(num_groups, size, first, last):
    num_shards = num_groups << size
    shards = range(min(first, last) % num_shards, min(max(first, last), num_shards))
    groups = groups_of(num_shards, num_groups)
    parts = parts_within(shards, groups, num_shards)
    assert [shard for part in parts for shard in range(part.lo, part.hi)] == list(shards)
    assert all(any(g.lo <= p.lo and p.hi <= g.hi for g in groups) for p in parts)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.shards import assign


@pytest.mark.parametrize(
    ("shards", "workers", "expected"),
    [
        (1, 1, [range(1)]),
        (4, 4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (8, 3, [range(3), range(3, 6), range(6, 8)]),
        (8, 1, [range(8)]),
        (7, 2, [range(4), range(4, 7)]),
    ],
)
def test_shards_are_divided_in_rank_order(shards, workers, expected):
    assert assign(shards, workers) == expected


@given(st.integers(1, 64).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))))
def test_every_shard_has_one_worker_and_sizes_differ_by_at_most_one(case):
    shards, workers = case
    ranges = assign(shards, workers)
    assert [shard for part in ranges for shard in part] == list(range(shards))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_more_workers_than_shards_are_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"`shards` must be at least the number of workers \(4\), but is 2: pass"
    ):
        assign(2, 4)


def test_no_worker_is_refused():
    with pytest.raises(ValueError, match="at least 1, but is 0"):
        assign(3, 0)

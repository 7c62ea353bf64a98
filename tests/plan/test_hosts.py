import pytest

from unisono.plan.shards import parts_of_hosts


@pytest.mark.parametrize(
    ("num_shards", "workers", "parts"),
    [
        (8, [2, 2], [1, 1]),
        (8, [1, 1, 1, 1], [1, 1, 1, 1]),
        (6, [1, 1], [2, 2]),
        (8, [1, 1, 1], [2, 2, 1]),
        (12, [1, 1, 1], [1, 1, 1]),
        (8, [1, 3], [1, 2]),
        (4, [4], [1]),
    ],
)
def test_parts_of_a_host_follow_from_its_shards(num_shards, workers, parts):
    assert parts_of_hosts(num_shards, workers) == parts

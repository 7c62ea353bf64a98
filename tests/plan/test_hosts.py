import pytest

from unisono.plan.shards import parts_of_hosts, shards_for_hosts


@pytest.mark.parametrize(
    ("num_shards", "workers", "parts", "better"),
    [
        (8, [2, 2], [1, 1], 8),
        (8, [1, 1, 1, 1], [1, 1, 1, 1], 8),
        (6, [1, 1], [2, 2], 8),
        (8, [1, 1, 1], [2, 2, 1], 6),
        (12, [1, 1, 1], [1, 1, 1], 12),
        (8, [1, 3], [1, 2], None),  # the first host would need half of the shards
        (4, [4], [1], 4),
    ],
)
def test_parts_of_a_host_follow_from_its_shards(num_shards, workers, parts, better):
    assert parts_of_hosts(num_shards, workers) == parts
    found = shards_for_hosts(num_shards, workers)
    assert found == better
    if found is not None:
        assert set(parts_of_hosts(found, workers)) == {1}

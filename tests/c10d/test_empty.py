"""Tensors in shared memory live as long as somebody has them, and no longer."""

import pytest
import torch
import torch.distributed as dist

import unisono.c10d


def test_a_tensor_outlives_its_group_and_gives_its_memory_back(as_ranks):
    kept = {}

    def work(group, rank):
        first = unisono.c10d.empty((3, 5), dtype=torch.float64, group=group)
        place = first.data_ptr()
        assert place % 64 == 0
        part = first[1]
        del first
        assert unisono.c10d.empty(4, group=group).data_ptr() != place
        del part
        assert unisono.c10d.empty(4, group=group).data_ptr() == place
        kept[rank] = unisono.c10d.empty(7, group=group).fill_(rank)
        return unisono.c10d.empty((0, 3), group=group).shape

    assert as_ranks(2, work) == [(0, 3), (0, 3)]
    assert [kept[rank].sum().item() for rank in (0, 1)] == [0, 7]


def test_each_rank_may_lay_out_its_memory_as_it_likes(as_ranks):
    def work(group, rank):
        before = [unisono.c10d.empty(100 * (rank + 1), group=group) for _ in range(rank + 1)]
        whole = unisono.c10d.empty(1001, group=group).fill_(rank)
        group.allreduce(whole[1:])
        assert whole[0] == rank
        del before
        return whole[1:].unique().tolist()

    assert as_ranks(3, work) == [[3], [3], [3]]


def test_another_backends_group_is_refused():
    with pytest.raises(ValueError, match='init_process_group\\("unisono"\\)'):
        unisono.c10d.empty(3, group=dist.ProcessGroup(0, 1))


def test_the_package_has_one_name():
    assert unisono.c10d.__all__ == ["empty"]
    with pytest.raises(AttributeError):
        unisono.c10d.zeros  # noqa: B018

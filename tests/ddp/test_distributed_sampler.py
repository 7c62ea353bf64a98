"""torch's indices, or each sample exactly once; and a word about a forgotten ``set_epoch``."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchSampler

import unisono
from unisono.distributed.distributed_sampler import DistributedSampler

lengths = st.integers(0, 60)
world_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**40)
epochs = st.integers(0, 1000)


def of_all_ranks(world_size, length, epoch=0, **options):
    samplers = [
        DistributedSampler(range(length), world_size, rank, **options) for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


@pytest.mark.slow
@given(lengths, world_sizes, st.booleans(), st.booleans(), seeds, epochs)
def test_the_indices_are_torchs(length, world_size, shuffle, drop_last, seed, epoch):
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    for rank, own in enumerate(of_all_ranks(world_size, length, epoch, **options)):
        torchs = TorchSampler(range(length), world_size, rank, **options)
        torchs.set_epoch(epoch)
        assert list(own) == list(torchs)
        assert len(own) == len(torchs)


@pytest.mark.slow
@given(lengths, world_sizes, st.booleans(), seeds, epochs)
def test_exact_gives_every_sample_once_in_torchs_order(length, world_size, shuffle, seed, epoch):
    options = {"shuffle": shuffle, "seed": seed}
    samplers = of_all_ranks(world_size, length, epoch, exact=True, **options)
    whole = TorchSampler(range(length), 1, 0, **options)
    whole.set_epoch(epoch)
    order = list(whole)
    taken = [list(sampler) for sampler in samplers]
    assert taken == [order[rank::world_size] for rank in range(world_size)]
    assert sorted(itertools.chain(*taken)) == list(range(length))
    assert [*map(len, samplers)] == [*map(len, taken)]


def test_it_is_torchs_class_with_torchs_signature():
    assert issubclass(unisono.distributed.DistributedSampler, TorchSampler)
    own = list(inspect.signature(DistributedSampler).parameters.values())
    torchs = list(inspect.signature(TorchSampler).parameters.values())
    assert [(p.name, p.kind, p.default) for p in own[:-1]] == [
        (p.name, p.kind, p.default) for p in torchs
    ]
    assert (own[-1].name, own[-1].kind) == ("exact", inspect.Parameter.KEYWORD_ONLY)


def test_exact_and_drop_last_are_refused_together():
    with pytest.raises(ValueError, match=r"exact.*exactly once and `drop_last`.*only one"):
        DistributedSampler(range(5), 2, 0, drop_last=True, exact=True)


def test_exact_is_a_flag():
    with pytest.raises(TypeError, match="`exact` must be True or False, but is 'no': pass"):
        DistributedSampler(range(5), 2, 0, exact="no")


@pytest.mark.parametrize(("num_replicas", "rank"), [(2, 2), (2, -1), (0, 0), (None, 1)])
def test_a_rank_beyond_the_others_is_refused(num_replicas, rank):
    with pytest.raises(ValueError, match=rf"below `num_replicas`.*but is {rank}"):
        DistributedSampler(range(5), num_replicas, rank)


def test_without_a_process_group_the_environment_says_who_this_is(monkeypatch):
    assert list(DistributedSampler(range(3), shuffle=False)) == [0, 1, 2]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(DistributedSampler(range(5), shuffle=False, exact=True)) == [1, 3]


def test_the_process_group_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert list(DistributedSampler(range(5), shuffle=False, exact=True)) == [0, 1, 2, 3, 4]
    finally:
        dist.destroy_process_group()


def test_a_dataset_that_has_grown_is_refused():
    dataset = list(range(10))
    sampler = DistributedSampler(dataset, 2, 0, exact=True)
    assert len(list(sampler)) == len(sampler) == 5
    dataset += [10, 11, 12]
    with pytest.raises(ValueError, match="had 10 and has 13: make a new sampler"):
        iter(sampler)

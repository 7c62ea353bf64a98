"""torch's indices, or each sample exactly once; and a word about a forgotten ``set_epoch``."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import unisono
from unisono.distributed.distributed_sampler import DistributedSampler, SameOrderWarning

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


@given(lengths, world_sizes)
def test_exact_knows_its_length_and_lengths_differ_by_one_at_most(length, world_size):
    samplers = of_all_ranks(world_size, length, exact=True)
    counted = [len(sampler) for sampler in samplers]
    assert counted == [len(list(sampler)) for sampler in samplers]
    assert counted[0] - counted[-1] in (0, 1)


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


# A forgotten `set_epoch`


def noted(iterate):
    """Return what was warned of while ``iterate`` ran."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        iterate()
    assert all(warning.category is SameOrderWarning for warning in seen)
    return seen


def sampler_of(rank=0, **options):
    return DistributedSampler(range(11), 2, rank, **options)


@pytest.mark.parametrize("exact", [False, True])
def test_a_second_epoch_without_set_epoch_is_told_once(exact):
    sampler = sampler_of(exact=exact)
    assert noted(lambda: list(sampler)) == []
    (seen,) = noted(lambda: [list(sampler) for _ in range(3)])
    assert "call `sampler.set_epoch(epoch)` at the top of the loop" in str(seen.message)
    assert "that of epoch 0" in str(seen.message)
    assert issubclass(seen.category, UserWarning)


THRICE = lambda one: [list(one) for _ in range(3)]  # noqa: E731


@pytest.mark.parametrize(
    ("options", "iterate", "times"),
    [
        pytest.param(
            {}, lambda one: [one.set_epoch(7), *THRICE(one)], 1, id="set_epoch before all epochs"
        ),
        pytest.param({}, lambda one: [next(iter(one)) for _ in "ab"], 1, id="left early"),
        pytest.param(
            {}, lambda one: [(one.set_epoch(n), list(one)) for n in (0, 0, 1, 1, 0)], 0, id="set"
        ),
        pytest.param(
            {}, lambda one: [(setattr(one, "epoch", n), list(one)) for n in range(3)], 0, id="attr"
        ),
        pytest.param({"shuffle": False}, THRICE, 0, id="an order that is meant to stay"),
        pytest.param({"rank": 1}, THRICE, 0, id="only rank 0 speaks"),
        pytest.param(
            {}, lambda one: [len(one), iter(one), iter(one), list(one)], 0, id="only one is used"
        ),
    ],
)
def test_it_is_told_of_epochs_with_one_order_alone(options, iterate, times):
    sampler = sampler_of(**options)
    assert len(noted(lambda: iterate(sampler))) == times


def test_the_order_is_that_of_the_epoch_in_which_iter_was_called():
    own, torchs = sampler_of(), TorchSampler(range(11), 2, 0)
    iterators = iter(own), iter(torchs)
    own.set_epoch(1)
    torchs.set_epoch(1)
    assert list(iterators[0]) == list(iterators[1])
    assert noted(lambda: list(own)) == []


def test_the_warning_points_to_the_loop_of_the_program():
    loader = DataLoader(range(11), batch_size=2, sampler=sampler_of())

    def two_epochs():
        for _ in range(2):
            for _ in loader:
                pass

    (seen,) = noted(two_epochs)
    first_line = inspect.getsourcelines(two_epochs)[1]
    assert seen.filename == __file__
    assert seen.lineno == first_line + 2


# In loaders, through pickle


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_give_the_same_and_start_no_false_alarm(persistent):
    sampler = sampler_of(exact=True)
    loader = DataLoader(
        torch.arange(11), 2, sampler=sampler, num_workers=1, persistent_workers=persistent
    )

    def epochs():
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert torch.cat(list(loader)).tolist() == list(sampler_at(epoch))

    assert noted(epochs) == []
    assert len(loader) == 3
    assert len(noted(lambda: list(loader))) == 1


def sampler_at(epoch):
    sampler = sampler_of(exact=True)
    sampler.set_epoch(epoch)
    return sampler


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_where_the_sampler_was(travel):
    sampler = sampler_at(3)
    iterator = iter(sampler)
    first = next(iterator)
    arrived, rest = travel(sampler), travel(iterator)
    assert [first, *rest] == list(sampler_at(3))
    assert len(arrived) == len(sampler)
    assert len(noted(lambda: list(arrived))) == 1
    arrived.set_epoch(4)
    assert list(arrived) == list(sampler_at(4))


def test_a_dataset_that_has_grown_is_refused():
    dataset = list(range(10))
    sampler = DistributedSampler(dataset, 2, 0, exact=True)
    assert len(list(sampler)) == len(sampler) == 5
    dataset += [10, 11, 12]
    with pytest.raises(ValueError, match="had 10 and has 13: make a new sampler"):
        iter(sampler)

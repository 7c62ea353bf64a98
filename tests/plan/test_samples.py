import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from unisono.plan.samples import SamplePlan

plans = st.integers(1, 12).flatmap(
    lambda shards: st.builds(
        SamplePlan,
        num_samples=st.integers(1, 200),
        batch_size=st.integers(shards, 60),
        shards=st.just(shards),
        shuffle=st.booleans(),
        seed=st.integers(0, 1000),
    )
)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (0, [[0, 3], [1, 4], [2]]),
        (1, [[6, 9], [7], [5, 8]]),
        (2, [[], [10], [11]]),
    ],
)
def test_shards_take_every_s_th_sample_and_the_last_batch_is_short(batch, expected):
    plan = SamplePlan(num_samples=12, batch_size=5, shards=3, shuffle=False)
    order = plan.order(0)
    assert [plan.shard_indices(order, batch, shard).tolist() for shard in range(3)] == expected
    assert [plan.shard_size(batch, shard) for shard in range(3)] == [len(e) for e in expected]
    assert plan.shard_sizes(batch) == [len(e) for e in expected]


@pytest.mark.slow
@given(plans, st.integers(0, 3))
def test_shards_of_a_batch_are_the_batch(plan, epoch):
    order = plan.order(epoch)
    said = range(plan.num_samples) if order is None else order.tolist()
    for batch in range(plan.steps_per_epoch):
        start, stop = plan.bounds(batch)
        parts = [plan.shard_indices(order, batch, shard).tolist() for shard in range(plan.shards)]
        assert sorted(sum(parts, [])) == sorted(said[start:stop])
        assert [plan.shard_size(batch, v) for v in range(plan.shards)] == [len(p) for p in parts]
        assert plan.shard_sizes(batch) == [len(p) for p in parts]
        assert plan.num_batch_samples(batch) == stop - start


@pytest.mark.slow
@given(plans, st.integers(0, 3))
def test_a_shard_gets_what_torchs_sampler_gives_without_its_padding(plan, epoch):
    order = plan.order(epoch)
    for shard in range(plan.shards):
        sampler = DistributedSampler(
            range(plan.num_samples),
            num_replicas=plan.shards,
            rank=shard,
            shuffle=plan.shuffle,
            seed=plan.seed,
        )
        sampler.set_epoch(epoch)
        padded = list(sampler)
        ours = [
            index
            for batch in range(plan.steps_per_epoch)
            for index in plan.shard_indices(order, batch, shard).tolist()
        ]
        positions = range(shard, plan.num_samples, plan.shards)
        assert ours == padded[: len(positions)]
        assert plan.positions(shard).tolist() == [*positions]
        assert plan.indices(epoch, shard).tolist() == ours


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 12))
def test_blocks_are_the_batches_of_a_plain_loop(num_samples, size, shards):
    plan = SamplePlan(num_samples, size * shards, shards, shuffle=False, in_blocks=True)
    order, passes = plan.order(0), {}
    for shard in range(shards):
        own = []
        for batch in range(plan.steps_per_epoch):
            indices = plan.shard_indices(order, batch, shard)
            assert plan.shard_size(batch, shard) == plan.shard_sizes(batch)[shard] == len(indices)
            if len(indices):
                passes[plan.as_progress(batch, shard)] = indices.tolist()
                own += indices.tolist()
        assert plan.positions(shard).tolist() == own
    expected = torch.arange(num_samples).split(size)
    assert passes == {(at, 0): batch.tolist() for at, batch in enumerate(expected)}


def test_the_largest_seed_has_epochs_as_well():
    plan = SamplePlan(100, 10, 2, shuffle=True, seed=2**64 - 1)
    assert sorted(plan.order(0).tolist()) == list(range(100))
    assert torch.equal(plan.order(3), SamplePlan(100, 10, 2, shuffle=True, seed=2).order(0))


def test_epochs_have_orders_of_their_own_and_the_seed_decides_them():
    plan = SamplePlan(100, 10, 2, shuffle=True, seed=3)
    assert not torch.equal(plan.order(0), plan.order(1))
    assert torch.equal(plan.order(1), SamplePlan(100, 20, 4, shuffle=True, seed=3).order(1))
    assert not torch.equal(plan.order(0), SamplePlan(100, 10, 2, shuffle=True, seed=4).order(0))


@pytest.mark.parametrize("num_samples", [1, 2, 1000, 300_001])
def test_an_order_of_half_the_bytes_is_the_same(num_samples):
    order = SamplePlan(num_samples, 1, 1, seed=11).order(4)
    generator = torch.Generator().manual_seed(15)
    assert order.dtype == torch.int32
    assert torch.equal(order.long(), torch.randperm(num_samples, generator=generator))


def test_the_order_of_the_dataset_takes_no_memory():
    plan = SamplePlan(10**12, 64, 2, shuffle=False)
    assert plan.order(0) is None
    assert plan.shard_indices(None, 10**9, 1).tolist() == [
        *range(64 * 10**9 + 1, 64 * 10**9 + 64, 2)
    ]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 4, 2), "at least one sample, but is empty"),
        ((10, 3, 4), r"at least `shards` \(4\), but is 3: pass `batch_size=4`"),
        ((10, 3, 0), "`shards` must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_the_remedy(numbers, message):
    with pytest.raises(ValueError, match=message):
        SamplePlan(*numbers)


def said(order, **options):
    """A plan whose order something else says."""
    order = torch.tensor(order)
    return SamplePlan(len(order), 4, 2, sampler="said", order_of=lambda epoch: order, **options)


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_sample_that_comes_again_is_told_from_the_first(order):
    repeats = said(order).repeats(0)
    expected = [order[:place].count(index) for place, index in enumerate(order)]
    assert (repeats is None) == (not any(expected))
    assert repeats is None or repeats.tolist() == expected


def test_a_plan_takes_the_order_that_is_said():
    plan = said([7, 3, 7, 7, 1])
    assert [plan.shard_indices(plan.order(0), 0, shard).tolist() for shard in (0, 1)] == [
        [7, 7],
        [3, 7],
    ]
    assert plan.steps_per_epoch == 2


def test_digests_tell_orders_apart_and_plans_with_a_function_made_anew_are_equal():
    assert said([1, 2]).digest(0) == said([1, 2]).digest(5) != said([2, 1]).digest(0)
    assert SamplePlan(4, 4, 2).digest(0) == ""
    assert said([1, 2]) == said([2, 1])
    assert said([1, 2]) != said([1, 2, 3])


# What a batch sampler cuts


class Cuts:
    """Batches of these sizes, in epoch e from the e-th size on."""

    def __init__(self, sizes):
        self.sizes = sizes

    def starts(self, epoch):
        return torch.tensor([0, *self.sizes[epoch:]]).cumsum(0)

    def num_batches(self, epoch):
        return len(self.sizes) - epoch


def cut(sizes, shards, **options):
    cuts = Cuts(sizes)
    order = torch.arange(sum(sizes)) * 10
    plan = SamplePlan(
        sum(sizes),
        max(1, sum(sizes) // len(sizes)),
        shards,
        shuffle=False,
        sampler="cut",
        order_of=lambda epoch: order[: sum(sizes[epoch:])],
        cuts=cuts,
        **options,
    )
    return plan.at(0)


@pytest.mark.parametrize(
    ("sizes", "shards", "groups", "expected"),
    [
        ([4, 1, 2], 3, 1, [[[0, 3], [1], [2]], [[4], [], []], [[5], [6], []]]),
        ([6, 2], 2, 2, [[[0, 1, 4, 5], [2, 3]], [[6, 7], []]]),
        ([5], 2, 3, [[[0, 1, 2], [3, 4]]]),
        ([7], 3, 2, [[[0, 1, 6], [2, 3], [4, 5]]]),
        ([1, 1], 1, 1, [[[0]], [[1]]]),
    ],
)
def test_every_batch_of_a_batch_sampler_begins_with_the_first_shard(
    sizes, shards, groups, expected
):
    plan = cut(sizes, shards, groups=groups)
    assert plan.steps_per_epoch == len(sizes)
    for batch, parts in enumerate(expected):
        found = [plan.shard_positions(batch, shard).tolist() for shard in range(shards)]
        assert found == parts
        assert plan.shard_sizes(batch) == [*map(len, parts)]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(0, [[0, 1], [2, 3]]), (1, [[4, 5], [6, 7]]), (2, [[8, 9], []])],
)
def test_groups_of_one_size_take_turns_as_samples_do(batch, expected):
    plan = SamplePlan(10, 4, 2, shuffle=False, groups=2)
    assert [plan.shard_indices(None, batch, shard).tolist() for shard in (0, 1)] == expected


sizes_of_batches = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@given(sizes_of_batches, st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_shards_of_batches_of_all_sizes_are_the_batches(sizes, shards, groups, in_blocks):
    plan = cut(sizes, shards, groups=1 if in_blocks else groups, in_blocks=in_blocks)
    order, seen = plan.order(0), {shard: [] for shard in range(shards)}
    for batch in range(plan.steps_per_epoch):
        start, stop = plan.bounds(batch)
        parts = [plan.shard_positions(batch, shard) for shard in range(shards)]
        assert sorted(torch.cat(parts).tolist()) == [*range(start, stop)]
        assert plan.shard_sizes(batch) == [len(part) for part in parts]
        assert [plan.shard_size(batch, v) for v in range(shards)] == plan.shard_sizes(batch)
        assert plan.num_batch_samples(batch) == stop - start
        for shard, part in enumerate(parts):
            assert plan.shard_indices(order, batch, shard).tolist() == order[part].tolist()
            seen[shard] += part.tolist()
            if len(part):
                assert plan.first_position(batch, shard) == part[0]
    for shard, positions in seen.items():
        assert plan.positions(shard).tolist() == positions
        assert plan.indices(0, shard).tolist() == order[positions].tolist()
    if in_blocks:
        assert [len(each) for each in plan.passes()] == sizes
        assert torch.equal(torch.cat([*plan.passes()]), order)


@given(sizes_of_batches)
def test_epochs_of_other_lengths_are_counted_as_they_are(sizes):
    plan = cut(sizes, 2)
    for epoch in range(len(sizes)):
        assert plan.at(epoch).steps_per_epoch == len(sizes) - epoch
        assert plan.at(epoch).bounds(0) == (0, sizes[epoch])
        assert plan == plan.at(epoch)
    assert plan.steps_between(0, len(sizes)) == sum(range(1, len(sizes) + 1))
    assert plan.steps_between(len(sizes), 0) == -plan.steps_between(0, len(sizes))


def test_digests_tell_cuts_apart_and_beginnings_are_those_of_longer_orders():
    assert cut([2, 2], 1).digest(0) != cut([1, 3], 1).digest(0)
    assert cut([2, 2], 1).digest(0, 2) == cut([2, 5], 1).digest(0, 2) != cut([1, 3], 1).digest(0, 2)

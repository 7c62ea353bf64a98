"""A sampler says the order of each epoch; wherever it is asked, it says the same, or is refused."""

import functools
import multiprocessing
import random

import numpy as np
import pytest
import torch
from tests.data import augmenting
from tests.loaders import loader_of
from tests.promises import promise
from tests.replacements import wait_for_replacement
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import unisono
from unisono.data.epoch_order import EpochOrder
from unisono.data.fetch import fetcher
from unisono.plan.samples import SamplePlan
from unisono.runtime.workers.context import context

N = augmenting.NUM_SAMPLES
WEIGHTS = torch.linspace(0.1, 1.0, N)


def weighted(epoch, seed):
    """More indices than samples, some several times."""
    generator = torch.Generator().manual_seed(seed + 1000 * epoch)
    return torch.multinomial(WEIGHTS, N + 9, replacement=True, generator=generator)


def as_shuffled(epoch, seed):
    return SamplePlan(N, 10, 3, seed=seed).order(epoch)


def train(sampler, loader_workers=0, *, steps=12, **options):
    trainer = augmenting.make(**options)
    data, size = augmenting.Noisy(), augmenting.BATCH_SIZE
    if not loader_workers:
        return trainer.fit(data, batch_size=size, steps=steps, sampler=sampler).digest
    loader = loader_of(data, size, sampler=sampler, num_workers=loader_workers)
    return trainer.fit(loader, steps=steps).digest


# What it may say


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        iter,
        np.array,
        torch.tensor,
        lambda numbers: torch.tensor(numbers, dtype=torch.uint8),
        lambda numbers: np.array(numbers, dtype=np.uint64),
        lambda numbers: [np.int32(number) for number in numbers],
        lambda numbers: [torch.tensor(number) for number in numbers],
    ],
)
def test_every_kind_of_row_of_whole_numbers_is_taken(kind):
    order = EpochOrder(lambda epoch, seed: kind([4, 0, 4, epoch, seed]), 2, 5)
    assert order(3).tolist() == [4, 0, 4, 3, 2]
    assert order(3).dtype == torch.int64
    assert order.num_samples == 5


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ([], ValueError, "must return at least one index"),
        ([0, 5], ValueError, "must return indices from 0 to 4, but said returns 5 for epoch 0"),
        ([-1, 0], ValueError, "but said returns -1"),
        ([0, 1.0], TypeError, r"must return integers in one row.* but said returns \[0, 1.0\]"),
        ([[0], [1, 2]], TypeError, r"returns \[\[0\], \[1, 2\]\]"),
        (torch.tensor([0.5]), TypeError, "returns tensor"),
        (torch.tensor([[0]]), TypeError, r"returns tensor"),
        ([True], TypeError, r"returns \[True\]"),
        (None, TypeError, "returns None"),
        ("01", TypeError, "returns '01'"),
    ],
)
def test_anything_else_is_refused_in_words(said, error, message):
    def sampler(epoch, seed):
        return said

    sampler.__name__ = "said"
    with pytest.raises(error, match=message):
        EpochOrder(sampler, 0, 5)


def test_epochs_of_another_length_are_refused_in_words():
    order = EpochOrder(lambda epoch, seed: range(4 - epoch), 0, 5)
    with pytest.raises(ValueError, match="returns 4 for epoch 0 and 3 for epoch 1"):
        order(1)
    trainer = augmenting.make()
    with pytest.raises(ValueError, match="returns 40 for epoch 0 and 39 for epoch 1"):
        for step in trainer.run.steps(
            augmenting.Noisy(), batch_size=10, epochs=2, sampler=lambda e, s: range(40 - e)
        ):
            with step:
                for batch in step.shards:
                    step.backward(augmenting.loss_of(trainer.run.model, batch))
    assert (trainer.run.position.epoch, trainer.run.position.batch) == (1, 0)


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (3, TypeError, "must be a function of"),
        (
            WeightedRandomSampler(WEIGHTS, 9, generator=torch.Generator()),
            ValueError,
            "create it without `generator`",
        ),
        (
            DistributedSampler(range(9), num_replicas=2, rank=0),
            ValueError,
            "returns those of one replica: leave it out",
        ),
        (BatchSampler(range(9), 3, False), TypeError, "must return integers in one row"),
    ],
)
def test_samplers_that_cannot_be_exact_are_refused_with_the_remedy(sampler, error, message):
    with pytest.raises(error, match=message):
        train(sampler)


def test_sampler_and_shuffle_exclude_each_other():
    trainer, options = augmenting.make(), {"batch_size": 10, "steps": 1, "sampler": weighted}
    with pytest.raises(ValueError, match="`shuffle` must be left out"):
        trainer.fit(augmenting.Noisy(), shuffle=True, **options)
    trainer.fit(augmenting.Noisy(), shuffle=False, **options)


# What follows from it


@pytest.mark.slow
def test_a_sampler_that_shuffles_as_we_do_gives_the_same_bits():
    trainer = augmenting.make()
    ours = trainer.fit(augmenting.Noisy(), batch_size=augmenting.BATCH_SIZE, steps=12).digest
    assert train(as_shuffled) == ours
    assert train(weighted) != ours


def test_an_epoch_is_as_long_as_what_the_sampler_says():
    trainer = augmenting.make()
    summary = trainer.fit(augmenting.Noisy(), batch_size=10, epochs=2, sampler=weighted)
    assert (summary.steps, summary.samples) == (12, 2 * (N + 9))


def test_a_sample_that_comes_again_is_augmented_anew():
    fetch = fetcher(augmenting.Noisy(), seed=1)
    first, second = fetch(torch.tensor([4, 4]), 0, torch.tensor([0, 1]))[0]
    assert not torch.equal(first, second)
    assert torch.equal(first, fetch(torch.tensor([4]), 0)[0][0])
    many = fetcher(augmenting.NoisyMany(), seed=1)
    draws = [many(torch.tensor([4]), 0, torch.tensor([count]))[0] for count in (0, 1)]
    assert not torch.equal(*draws)
    assert torch.equal(draws[0], many(torch.tensor([4]), 0)[0])


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(N)),
        RandomSampler(range(N), replacement=True, num_samples=60),
        SubsetRandomSampler(range(5, 30)),
        WeightedRandomSampler(WEIGHTS, 33),
        SequentialSampler(range(N)),
        DistributedSampler(range(N), num_replicas=1, rank=0),
        range(20),
    ],
)
def test_torchs_samplers_say_the_same_whenever_they_are_asked(sampler):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    orders = [EpochOrder(sampler, 1, N)(epoch).tolist() for epoch in (0, 1, 0, 1)]
    assert orders[:2] == orders[2:]
    assert torch.equal(torch.get_rng_state(), before)
    is_random = not isinstance(sampler, (SequentialSampler, range))
    assert (orders[0] != orders[1]) == is_random


def test_what_a_sampler_draws_depends_on_the_epoch_and_the_seed_alone():
    def drawn(epoch, seed):
        return [random.randrange(99), np.random.randint(99), int(torch.randint(99, ()))]

    orders = [EpochOrder(drawn, seed, 99)(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert orders == [
        EpochOrder(drawn, seed, 99)(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)
    ]
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.slow
def test_loader_processes_read_in_the_order_that_the_worker_was_told():
    def whimsical(epoch, seed):
        return range(N) if multiprocessing.parent_process() is None else range(N)[::-1]

    assert train(whimsical, 2) == train(whimsical)


# Resuming


@pytest.mark.slow
def test_a_run_resumes_in_the_midst_of_an_epoch_in_the_order_of_the_sampler(tmp_path):
    whole = train(weighted)
    for loader_workers, steps in ((0, 3), (1, 8), (0, 12)):
        result = train(weighted, loader_workers, steps=steps, directory=tmp_path)
    assert result == whole


def test_an_epoch_goes_on_as_it_began_and_another_order_is_told(tmp_path, monkeypatch, capsys):
    whole = train(weighted)
    for steps in (8, 9):
        train(weighted, steps=steps, directory=tmp_path)
    assert "another order" not in capsys.readouterr().out
    monkeypatch.setattr("tests.data.test_epoch_order.WEIGHTS", WEIGHTS.flip(0))
    assert train(weighted, directory=tmp_path) == whole
    said = "weighted would now return a different order from the one with which epoch 1 began"
    assert capsys.readouterr().out.count(said) == 1


def test_another_order_from_the_next_epoch_on_is_the_programs_to_say(tmp_path, monkeypatch):
    train(weighted, steps=6, directory=tmp_path)
    monkeypatch.setattr("tests.data.test_epoch_order.WEIGHTS", WEIGHTS.flip(0))
    train(weighted, directory=tmp_path)


def test_the_sampler_is_part_of_what_the_run_is(tmp_path):
    train(weighted, steps=3, directory=tmp_path)
    with pytest.raises(unisono.errors.CheckpointError, match="`sampler` must be 'weighted'"):
        train(None, directory=tmp_path)
    with pytest.raises(unisono.errors.CheckpointError, match="`dataset length` must be 56"):
        short = lambda epoch, seed: weighted(epoch, seed)[:-1]  # noqa: E731
        short.__name__ = "weighted"
        train(short, directory=tmp_path)


def test_a_sampler_stays_within_an_epoch():
    trainer = augmenting.make()
    steps = trainer.run.steps(augmenting.Noisy(), batch_size=10, epochs=1, sampler=weighted)
    with next(steps) as step:
        for batch in step.shards:
            step.backward(augmenting.loss_of(trainer.run.model, batch))
    steps.close()
    with pytest.raises(ValueError, match="`sampler` must stay within an epoch") as raised:
        trainer.run.steps(augmenting.Noisy(), batch_size=10, epochs=1)
    assert "weighted' and is None, after 1 steps of epoch 0" in str(raised.value)
    assert "`seed`" not in str(raised.value)
    assert "finish the epoch first, with `epochs=1` instead of `steps`" in str(raised.value)


# Several workers


def order_of_ones_own(epoch, seed):
    """Differs between workers from the second epoch on."""
    return torch.arange(N).roll(unisono.world().rank if epoch else 0)


def train_cases():
    cases = [(weighted, 0), (weighted, 2), (WeightedRandomSampler(WEIGHTS, 30), 0)]
    digests = [train(*case) for case in cases]
    try:
        train(order_of_ones_own)
    except unisono.errors.MismatchError as error:
        return digests, str(error)
    return digests, ""


@pytest.fixture(scope="module")
def alone():
    digests, _ = train_cases()
    assert digests[0] == digests[1] != digests[2]
    return digests


@promise("conditions.4")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_digest_is_the_same_on_any_number_of_workers_with_a_sampler(alone, workers):
    (first, said), *others = unisono.launch(train_cases, workers=workers)
    assert first == alone
    assert others == [(alone, said)] * (workers - 1)
    assert said.startswith("the sampler's order of epoch 1 must be the same on every worker, but")


@pytest.mark.slow
def test_workers_that_are_killed_where_epochs_end_cost_nothing(monkeypatch):
    three_epochs = functools.partial(train, weighted, steps=18)
    alone = three_epochs()
    length = -(-(N + 9) // augmenting.BATCH_SIZE)
    places = [(1, length - 1, "update"), (2, length, "begin"), (0, 2 * length - 1, "commit")]
    faults = [f"kill:rank={rank},step={step},at={at}" for rank, step, at in places]
    monkeypatch.setenv("UNISONO_FAULTS", "; ".join(faults))
    assert unisono.launch(three_epochs, workers=3) == [alone] * 3


class Patient:
    """Waits where a worker is lost, so that a replacement comes while there are epochs to go."""

    __name__ = "patient"

    def __init__(self):
        self.asked = []

    def __call__(self, epoch, seed):
        self.asked.append(epoch)
        wait_for_replacement(context().team())
        return weighted(epoch, seed)[:10]


def train_in_epochs_of_one_step():
    sampler = Patient()
    return train(sampler, steps=20), sampler.asked


@pytest.mark.slow
def test_a_replacement_that_joins_where_an_epoch_begins_agrees_with_the_others(monkeypatch):
    alone, asked = train_in_epochs_of_one_step()
    assert asked == list(range(20))
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=7")
    results = unisono.launch(train_in_epochs_of_one_step, workers=2)
    assert [digest for digest, _ in results] == [alone] * 2
    assert results[0][1] == asked
    first, *joined = results[1][1]
    assert (first, joined) == (0, list(range(joined[0], 20)))
    assert joined[0] > 7


def known_order():
    torch.manual_seed(4)
    model = torch.nn.Linear(6, 2)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    x = torch.randn(N, 6)
    for step in run.steps(x, batch_size=4, steps=3, sampler=as_shuffled):
        with step:
            for batch in step.shards:
                step.backward(model(batch).mean())
    return run.last.get("order")


@pytest.mark.slow
def test_who_replaces_the_only_worker_keeps_the_order_with_the_run(monkeypatch):
    alone = known_order()
    assert alone
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=0,at=update")
    assert unisono.launch(known_order, workers=1) == [alone]

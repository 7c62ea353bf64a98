"""A batch sampler says the batches: those of a plain loop, on any number of workers."""

import functools
import itertools
import random
import sys
import tracemalloc

import pytest
import torch
from tests.classified import cross_entropy as loss_of
from tests.data import augmenting, in_batches
from tests.data.in_batches import KINDS, LENGTHS, N, loader_with, train, train_patiently
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import unisono
from unisono.data.epoch_order import EpochOrder
from unisono.plan.seeds import seed_of
from unisono.runtime.device import seed_generators

SETS = TensorDataset(torch.randn(N, 6), torch.arange(N) % 3)


def model_of():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batches_of_a_plain_loop(kind, steps):
    """Loop over torch's own DataLoader, its generators seeded for each epoch as ours are."""
    epoch, left = 0, steps
    sampler = KINDS[kind]()
    while left:
        word = seed_of("sampler", 0, epoch)
        seed_generators(word)
        if hasattr(sampler, "generator") and isinstance(sampler.generator, random.Random):
            order = EpochOrder(sampler, 0, N, in_batches=True)
            given = order(epoch).tensor_split(order.starts(epoch)[1:-1])
        elif callable(sampler):
            given = sampler(epoch, 0)
        else:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            given = sampler
        for batch in DataLoader(SETS, batch_sampler=list(given)):
            if left:
                yield batch
                left -= 1
        epoch += 1


def in_a_plain_loop(kind, steps):
    model, optimizer = model_of()
    for batch in batches_of_a_plain_loop(kind, steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "endless"])
def test_one_shard_has_the_bits_of_a_plain_loop(kind):
    expected = in_a_plain_loop(kind, 20)
    for shards in (1, 3):
        model, optimizer = model_of()
        trainer = unisono.Trainer(model, optimizer, loss_of, shards=shards)
        trainer.fit(loader_with(kind, dataset=SETS), steps=20)
        for ours, plain in zip(model.parameters(), expected, strict=True):
            if shards == 1:
                assert torch.equal(ours, plain)
            torch.testing.assert_close(ours, plain)


def test_a_loop_of_ones_own_takes_batches_and_steps_tell_their_samples():
    model, optimizer = model_of()
    run = unisono.Run(model, optimizer, shards=4)
    seen, batches = [], [[4, 0, 9, 2, 7], [3], [8, 1]]
    for step in run.steps(SETS, batch_sampler=batches, epochs=2):
        sizes = []
        with step:
            for batch in step.shards:
                sizes.append(len(batch[0]))
                step.backward(loss_of(model, batch))
        seen.append((step.indices, sizes, step.num_samples))
    expected = [([4, 0, 9, 2, 7], [2, 1, 1, 1], 5), ([3], [1], 1), ([8, 1], [1, 1], 2)]
    assert seen == expected * 2
    assert (run.position.epoch, run.position.batch, run.position.step) == (2, 0, 6)


def test_torchs_own_batch_sampler_is_a_batch_size_and_an_order():
    found = [
        augmenting.make().fit(in_batches.Noisy(), epochs=2, shuffle=False, **given).digest
        for given in ({"batch_size": 10}, {"batch_size": 10, "drop_last": True})
    ]
    for drop_last in (False, True):
        batches = BatchSampler(SequentialSampler(range(N)), 10, drop_last)
        loader = DataLoader(in_batches.Noisy(), batch_sampler=batches)
        assert augmenting.make().fit(loader, epochs=2).digest == found[drop_last]


def test_a_sampler_of_ones_own_may_leave_the_last_samples_out():
    seen = []
    loader = DataLoader(SETS, 4, sampler=[9, 0, 3, 3, 5, 1], drop_last=True)
    run = unisono.Run(*model_of(), shards=2)
    for step in run.steps(loader, epochs=2):
        with step:
            for batch in step.shards:
                step.backward(loss_of(run.model, batch))
        seen.append(step.indices)
    assert seen == [[9, 0, 3, 3]] * 2


def counted(model, batch):
    loss = loss_of(model, batch)
    return {"loss": loss, "samples": torch.tensor(len(batch[0]))}


def test_evaluation_goes_over_the_batches_and_predictions_come_in_the_datasets_order():
    model, optimizer = model_of()
    trainer = unisono.Trainer(model, optimizer, counted, shards=3)
    loader = DataLoader(SETS, batch_sampler=in_batches.Buckets())
    found = trainer.evaluate(loader)
    assert found["samples"] == N
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(SETS.tensors[0]), SETS.tensors[1])
        rows = model(SETS.tensors[0])
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(trainer.predict(loader), rows)
    sums = trainer.evaluate(loader, metrics={"first": lambda outputs, targets: outputs[0].sum()})
    assert sums["first"] == pytest.approx(rows[0].sum().item(), rel=1e-5)


def test_evaluation_refuses_batches_that_leave_a_sample_out_or_take_one_twice():
    trainer = unisono.Trainer(*model_of(), loss_of)
    for batches, words in (
        ([[0, 1], list(range(3, N))], "takes sample 2 0 times"),
        ([[0], list(range(N))], "takes sample 0 2 times"),
    ):
        loader = DataLoader(SETS, batch_sampler=batches)
        with pytest.raises(ValueError, match=words):
            trainer.evaluate(loader)
    few = Subset(SETS, [0, 1, *range(3, N)])
    trainer.evaluate(DataLoader(few, batch_sampler=[range(N - 1)]))  # the remedy


def test_a_validation_set_without_batches_of_its_own_is_refused_with_the_remedy():
    trainer = unisono.Trainer(*model_of(), loss_of)
    with pytest.raises(ValueError, match="pass a DataLoader, `DataLoader"):
        trainer.fit(loader_with("tokens", dataset=SETS), steps=1, validate=SETS)
    trainer.fit(
        loader_with("tokens", dataset=SETS), steps=1, validate=DataLoader(SETS, batch_size=64)
    )


# What is refused


class Counting:
    """Its order depends on how often it was asked."""

    asked = 0

    def __iter__(self):
        self.asked += 1
        return iter([[self.asked, 0]])


class ShufflingInPlace:
    def __init__(self):
        self.batches = [[index] for index in range(N)]

    def __iter__(self):
        random.shuffle(self.batches)
        return iter(self.batches)


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        ([], ValueError, "must return at least one index"),
        ([[0], []], ValueError, "none for batch 1 of epoch 0: leave such a batch out"),
        ([[0], [N]], ValueError, f"indices from 0 to {N - 1}, but list returns {N}"),
        ([0, 1], TypeError, "must return batches, each a list of integers"),
        ([[0.5]], TypeError, r"but list returns \[0.5\]"),
        ([[0], ["a"]], TypeError, r"but list returns \['a'\]"),
        (["01"], TypeError, "but list returns '01'"),
        ([[2**70]], TypeError, "must return batches"),
        (7, TypeError, "must be a function of"),
        (Counting(), ValueError, "let it shuffle a copy, and count nothing"),
        (ShufflingInPlace(), ValueError, "let it shuffle a copy"),
        (lambda epoch, seed: itertools.repeat([0]), ValueError, "and more: train with `steps="),
    ],
    ids=map(str, range(12)),
)
def test_what_cannot_be_exact_is_refused_in_words(batches, error, words, monkeypatch):
    monkeypatch.setattr("unisono.data.epoch_order._ENDLESS_FROM", 50)
    trainer = unisono.Trainer(*model_of(), loss_of)
    with pytest.raises(error, match=words):
        trainer.fit(SETS, batch_sampler=batches, epochs=1)
    assert trainer.run.position.step == 0


def test_batches_and_what_else_says_them_exclude_each_other():
    trainer = unisono.Trainer(*model_of(), loss_of)
    for given in ({"batch_size": 4}, {"shuffle": True}, {"sampler": [0]}, {"drop_last": True}):
        with pytest.raises(ValueError, match="must be left out where a `batch_sampler` says"):
            trainer.fit(SETS, batch_sampler=[[0]], epochs=1, **given)
    with pytest.raises(ValueError, match="`batch_sampler` must be left out where a DataLoader"):
        trainer.fit(DataLoader(SETS), batch_sampler=[[0]], epochs=1)


# Memory


def test_the_order_of_many_batches_takes_less_memory_than_its_list():
    num_batches, size = 100_000, 4
    batches = [[at % 1000, 1, 2, 3] for at in range(num_batches)]
    its_own = sys.getsizeof(batches) + num_batches * sys.getsizeof(batches[0])
    tracemalloc.start()
    try:
        order = EpochOrder(batches, 0, 1000, in_batches=True)
        order.starts(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(order(0)) == num_batches * size
    assert peak < its_own


# Without end


def test_batches_without_end_are_read_as_far_as_the_steps_go_and_further_when_they_do():
    def fit(*totals):
        model, optimizer = model_of()
        trainer = unisono.Trainer(model, optimizer, loss_of, shards=2)
        for steps in totals:
            history = trainer.fit(SETS, batch_sampler=in_batches.endless, steps=steps)
        assert trainer.run.position.epoch == 0
        return history.digest

    assert fit(5, 30) == fit(30)


# Groups


def test_groups_stay_together_and_every_answer_to_a_prompt_is_in_one_shard():
    class Answers(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.tensor([index // 4, index])

    model = nn.Linear(1, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=3)
    prompts = lambda epoch, seed: (  # noqa: E731
        torch.randperm(6)[:, None] * 4 + torch.arange(4)
    ).flatten()
    for step in run.steps(Answers(), batch_size=16, epochs=1, sampler=prompts, groups=4):
        with step:
            for batch in step.shards:
                _, counts = batch[:, 0].unique(return_counts=True)
                assert set(counts.tolist()) == {4}
                step.backward(model(batch[:, 1:].float()).mean())
    for batches in ([list(range(24))], [list(range(8)), list(range(8, 24))]):
        epochs = run.position.epoch + 1
        for step in run.steps(Answers(), batch_sampler=batches, epochs=epochs, groups=4):
            with step:
                for batch in step.shards:
                    assert set(batch[:, 0].unique(return_counts=True)[1].tolist()) == {4}
                    step.backward(model(batch[:, 1:].float()).mean())


def test_batches_of_broken_groups_are_refused_with_the_remedy():
    trainer = unisono.Trainer(*model_of(), loss_of, shards=3)
    with pytest.raises(ValueError, match=r"whole groups of 4, .*: pass `batch_size=12`"):
        trainer.fit(SETS, batch_size=10, groups=4, epochs=1)
    trainer.fit(SETS, batch_size=12, groups=4, epochs=1)


# Several workers


CASES = [(kind, 0) for kind in KINDS] + [("tokens", 2), ("growing", 2), ("endless", 1)]


@functools.cache
def alone():
    found = in_batches.train_all(CASES)
    assert len({digest for digest, *_ in found}) == len(KINDS)
    assert found[0] == found[-3]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_all_is_the_same_on_any_number_of_workers(workers):
    assert unisono.launch(in_batches.train_all, CASES, workers=workers) == [alone()] * workers


@pytest.mark.slow
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_worker_that_is_killed_is_replaced_and_costs_no_bit(monkeypatch, loader_workers):
    expected = train("tokens", loader_workers)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=4; kill:rank=0,step=11,at=update")
    found = unisono.launch(train_patiently, "tokens", loader_workers, workers=2)
    assert [each for each, _ in found] == [expected] * 2
    assert all(joined is not None and joined < 27 for _, joined in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "endless"])
def test_a_run_resumes_in_the_midst_of_an_epoch_on_other_numbers_of_workers(tmp_path, kind):
    expected = train(kind, steps=27)
    for steps, workers, loader_workers in ((4, 1, 0), (15, 3, 2), (20, 2, 1), (27, 1, 0)):
        resume = functools.partial(train, kind, loader_workers, steps=steps, directory=tmp_path)
        found = unisono.launch(resume, workers=workers)
    digest, _, validation, rows = found[0]
    assert [digest, validation, rows] == [expected[0], *expected[2:]]


def test_an_epoch_goes_on_as_it_began_and_other_batches_are_told(tmp_path, monkeypatch, capsys):
    train("tokens", steps=2, directory=tmp_path)
    monkeypatch.setattr(in_batches, "LENGTHS", LENGTHS[::-1])
    train("tokens", steps=4, directory=tmp_path)
    assert "would now return a different order" in capsys.readouterr().out


class Growing:
    """Its batches grow: a callback says so at the end of an epoch."""

    def __init__(self):
        self.size = 8

    def __iter__(self):
        return map(torch.Tensor.tolist, torch.randperm(N).split(self.size))


class Grows(unisono.callbacks.Callback):
    def __init__(self, sampler):
        self.sampler = sampler

    def on_epoch_end(self, fit):
        self.sampler.size *= 2


def train_growing(loader_workers=0, steps=None, **options):
    sampler, (model, optimizer) = Growing(), model_of()
    trainer = unisono.Trainer(model, optimizer, loss_of, callbacks=[Grows(sampler)], **options)
    data = Subset(Augmented(), range(N))
    trainer.fit(
        DataLoader(data, batch_sampler=sampler, num_workers=loader_workers), epochs=3, steps=steps
    )
    return trainer.digest(), trainer.run.position.step


class Augmented(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        row, label = SETS[index]
        return row + 0.1 * torch.randn(6), label


def test_batches_that_a_callback_changes_at_the_end_of_an_epoch_are_read_ahead_as_changed():
    alone = train_growing()
    assert alone[1] == sum(-(-N // size) for size in (8, 16, 32))
    assert train_growing(loader_workers=2) == alone


def test_a_run_resumed_between_two_epochs_has_the_batches_that_a_callback_has_changed(tmp_path):
    train_growing(steps=-(-N // 8), directory=tmp_path)
    assert train_growing(directory=tmp_path) == train_growing()

"""A DataLoader of torch is taken apart: dataset, order, collate_fn and processes are used."""

import pytest
import torch
from tests.classified import taken
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import unisono
from unisono.data.data_reading import Reading


def data(num_samples=22):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make():
    torch.manual_seed(2)
    model = nn.Linear(3, 1)
    return unisono.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, shards=2, callbacks=[]
    )


def digest(*args, **options):
    trainer = make()
    trainer.fit(*args, epochs=2, **options)
    return trainer.digest()


def collate(samples):
    return torch.utils.data.default_collate(samples)


class Stream(IterableDataset):
    def __len__(self):
        return 22

    def __iter__(self):
        return iter(data())


SAME = {
    "in order": (lambda: DataLoader(data(), 4), {"shuffle": False}),
    "shuffled": (lambda: DataLoader(data(), 4, shuffle=True), {}),
    "a generator": (
        lambda: DataLoader(data(), 4, shuffle=True, generator=torch.Generator()),
        {},
    ),
    "processes": (
        lambda: DataLoader(data(), 4, num_workers=1, persistent_workers=True),
        {"shuffle": False},
    ),
    "collate_fn": (lambda: DataLoader(data(), 4, collate_fn=collate), {"shuffle": False}),
    "pinned": (lambda: DataLoader(data(), 4, pin_memory=True), {"shuffle": False}),
    "a sampler of one's own": (
        lambda: DataLoader(data(), 4, sampler=[3, 1, 2, 0]),
        {"sampler": [3, 1, 2, 0]},
    ),
    "weights": (
        lambda: DataLoader(data(), 4, sampler=WeightedRandomSampler([1.0] * 22, 9)),
        {"sampler": WeightedRandomSampler([1.0] * 22, 9)},
    ),
    "of one rank": (
        lambda: DataLoader(data(), 4, sampler=DistributedSampler(data(), 2, 0)),
        {"shuffle": True},
    ),
    "drop_last": (
        lambda: DataLoader(data(), 4, drop_last=True),
        {"sampler": list(range(20))},
    ),
    "drop_last, nothing left": (
        lambda: DataLoader(data(), 2, drop_last=True),
        {"shuffle": False, "batch_size": 2},
    ),
    "a batch sampler as torch makes it": (
        lambda: DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), 4, True)),
        {"sampler": list(range(20))},
    ),
}


@pytest.mark.parametrize("form", SAME)
def test_a_loader_trains_as_its_parts_do(form):
    make_loader, options = SAME[form]
    assert digest(make_loader()) == digest(data(), **{"batch_size": 4, **options})


def test_some_of_the_samples_are_those_that_are_chosen():
    loader = DataLoader(data(), 4, sampler=SubsetRandomSampler([5, 7, 9, 11, 2]))
    chosen = Subset(data(), [5, 7, 9, 11, 2])
    assert digest(loader) == digest(chosen, batch_size=4)
    found = make().evaluate(loader)
    assert found == make().evaluate(chosen, batch_size=4)


def test_shuffled_epochs_without_the_last_batch_differ():
    reading = Reading.of(DataLoader(data(), 4, shuffle=True, drop_last=True), None)
    trainer = make()
    plan = trainer.run._context.plan_pass(reading)
    assert plan.num_samples == 20
    first, second = plan.order(0), plan.order(1)
    assert len(set(first.tolist())) == 20
    assert not torch.equal(first, second)
    assert torch.equal(first, trainer.run._context.plan_pass(reading).order(0))


def test_a_stream_in_a_loader_is_read():
    assert digest(DataLoader(Stream(), 4)) == digest(Stream(), batch_size=4)


def test_loaders_serve_run_evaluate_predict_and_validation():
    loader, trainer = DataLoader(data(), 5, shuffle=True), make()
    assert trainer.evaluate(loader) == trainer.evaluate(data(), batch_size=5)
    assert torch.equal(trainer.predict(loader), trainer.predict(data(), batch_size=5))
    of_validation = DataLoader(data(9), 3)
    summary = trainer.fit(loader, epochs=1, validate=of_validation)
    assert summary.validation == trainer.evaluate(data(9), batch_size=3)
    other = make()
    assert other.fit(loader, epochs=1, validate=data(9)).validation == pytest.approx(
        summary.validation
    )
    run = make().run
    list(taken(run, loss_of, DataLoader(data(), 5, shuffle=True), epochs=1))
    third = make()
    third.fit(data(), batch_size=5, epochs=1)
    assert torch.equal(run.model.weight, third.run.model.weight)


class OfTheirOwn(DataLoader):
    pass


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (lambda: DataLoader(data(), 4), {"batch_size": 4}, "`batch_size` must be left out"),
        (lambda: DataLoader(data(), 4), {"shuffle": True}, "`shuffle` must be left out"),
        (lambda: DataLoader(data(), 4), {"sampler": [1]}, "`sampler` must be left out"),
        (lambda: DataLoader(data(), None), {}, "no `batch_size`"),
        (lambda: OfTheirOwn(data(), 4), {}, "its own class"),
        (lambda: DataLoader(data(), 4, worker_init_fn=print), {}, "a `worker_init_fn`"),
        (lambda: DataLoader(data(), 30, drop_last=True), {}, "only 22 samples"),
    ],
)
def test_what_cannot_be_kept_is_refused(loader, options, words):
    with pytest.raises(ValueError, match=words):
        make().fit(loader(), epochs=1, **options)


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(3), replacement=True),
        SequentialSampler(range(8)),
        DistributedSampler(range(8), num_replicas=1, rank=0),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_evaluation_takes_every_sample_once(sampler):
    loader = DataLoader(data(), 4, sampler=sampler)
    for use in (make().evaluate, make().predict):
        with pytest.raises(ValueError, match="every sample of a dataset once"):
            use(loader)
    with pytest.raises(ValueError, match="every sample of a dataset once"):
        make().fit(data(), batch_size=4, epochs=1, validate=loader)


def test_a_batch_size_is_needed_without_a_loader():
    for use in (make().evaluate, make().predict, lambda d: make().fit(d, epochs=1)):
        with pytest.raises(TypeError, match="`batch_size` must say how many samples"):
            use(data())

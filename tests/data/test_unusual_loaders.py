"""Orders without an end, keys for numbers, several loaders, loaders of other libraries."""

import itertools
import random

import datasets
import pytest
import torch
from tests.classified import cross_entropy as loss_of
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import unisono
from unisono.plan.seeds import seed_of
from unisono.runtime.device import seed_generators

N = 23
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, torch.arange(N) % 3)


def made():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(dataset, *, shards=1, loss=loss_of, **options):
    model, optimizer = made()
    trainer = unisono.Trainer(model, optimizer, loss, shards=shards)
    trainer.fit(dataset, **options)
    return weights_of(model)


def in_a_plain_loop(batches, loss=loss_of):
    model, optimizer = made()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return weights_of(model)


# Without an end


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from torch.randperm(N).tolist()


class Repeating(Endless):
    """Says a length, and gives more."""

    def __len__(self):
        return N


def test_a_sampler_that_gives_more_than_its_length_gives_what_the_steps_need():
    seed_generators(seed_of("sampler", 0, 0))
    order = list(itertools.islice(Repeating(), 12 * 8))
    plain = in_a_plain_loop(DATA[order[at : at + 8]] for at in range(0, len(order), 8))
    assert torch.equal(trained(DataLoader(DATA, 8, sampler=Repeating()), steps=12), plain)
    ours = trained(DATA, batch_size=8, sampler=Repeating(), steps=12, shards=3)
    torch.testing.assert_close(ours, plain)


def test_epochs_of_a_sampler_without_an_end_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("unisono.data.epoch_order._ENDLESS_FROM", 50)
    with pytest.raises(ValueError, match="returns 2,300 for epoch 0 and more: train with `steps="):
        trained(DataLoader(DATA, 8, sampler=Endless()), epochs=1)


# Keys


class Sized(Dataset):
    """Asked for a sample and how it is scaled, as detectors of several scales are."""

    def __len__(self):
        return N

    def __getitem__(self, key):
        index, scale = key
        return X[index] * scale + torch.randn(6) * 0.0, index % 3


class Named(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, name):
        return X[int(name[1:])], int(name[1:]) % 3


def scaled(epoch, seed):
    generator = random.Random(seed + 7 * epoch)
    return [(index, generator.choice([0.5, 1.0])) for index in generator.sample(range(N), N)]


def named(epoch, seed):
    return [f"n{index}" for index in torch.randperm(N).tolist()] + ["n3", "n3"]


def train_by_keys(loader_workers=0):
    scaled_batches = lambda epoch, seed: itertools.batched(scaled(epoch, seed), 5)  # noqa: E731
    loaders = [
        DataLoader(Sized(), 8, sampler=scaled),
        DataLoader(Named(), 8, sampler=named, num_workers=loader_workers),
    ]
    if hasattr(itertools, "batched"):
        loaders.append(DataLoader(Sized(), batch_sampler=scaled_batches))
    return [trained(loader, shards=3, epochs=2).tolist() for loader in loaders]


def test_samplers_may_give_tuples_and_texts():
    plain = in_a_plain_loop(
        batch for epoch in range(2) for batch in DataLoader(Sized(), 8, sampler=scaled(epoch, 0))
    )
    assert torch.equal(trained(DataLoader(Sized(), 8, sampler=scaled), epochs=2), plain)
    ours = trained(Sized(), batch_size=8, sampler=scaled, epochs=2, shards=3)
    torch.testing.assert_close(ours, plain)
    seen = trained(DataLoader(Named(), 8, sampler=["n2", "n7", "n2"]), epochs=1)
    assert torch.equal(seen, in_a_plain_loop([DATA[[2, 7, 2]]]))


def test_a_batch_sampler_may_give_tuples():
    batches = [[(4, 0.5), (0, 2.0)], [(7, 1.0)]]
    plain = in_a_plain_loop(DataLoader(Sized(), batch_sampler=batches))
    assert torch.equal(trained(DataLoader(Sized(), batch_sampler=batches), epochs=1), plain)


def test_a_sample_that_cannot_be_read_is_named_by_its_key():
    with pytest.raises(unisono.errors.LoadingError, match="'nx'"):
        trained(DataLoader(Named(), 8, sampler=["n2", "nx"]), epochs=1)


@pytest.mark.slow
def test_keys_are_the_same_on_any_number_of_workers():
    expected = train_by_keys()
    for workers, loader_workers in ((2, 0), (3, 2)):
        assert unisono.launch(train_by_keys, loader_workers, workers=workers)[-1] == expected


# Several loaders


@pytest.mark.parametrize(
    "several",
    [
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": b},
        lambda a, b: zip(a, b, strict=False),
        lambda a, b: type("CombinedLoader", (), {})(),
    ],
)
def test_several_loaders_are_refused_for_a_dataset_of_pairs(several):
    """The remedy is the row `Pairs`."""
    few, many = DataLoader(DATA, 5), DataLoader(DATA, 5)
    with pytest.raises(TypeError, match="pass a dataset of pairs"):
        trained(several(few, many), epochs=1, batch_size=5)


# Of other libraries


class OfGraphs(DataLoader):
    """Made as PyTorch Geometric makes its own: a class, and a `collate_fn` that it needs."""

    def __init__(self, dataset, batch_size=1, shuffle=False, **options):
        collate_fn = lambda graphs: {"x": torch.cat(graphs), "num": len(graphs)}  # noqa: E731
        super().__init__(dataset, batch_size, shuffle, collate_fn=collate_fn, **options)


def test_a_loader_of_graphs_is_refused_with_the_remedy_that_keeps_its_collate_fn():
    graphs = [X[at : at + 1 + at % 3] for at in range(N - 3)]
    loader = OfGraphs(graphs, 4, shuffle=True)

    def loss(model, batch):
        return model(batch["x"]).square().sum(), float(batch["num"])

    with pytest.raises(ValueError, match=r"collate_fn=loader\.collate_fn\)"):
        trained(loader, loss=loss, epochs=1)
    plain = DataLoader(
        loader.dataset, loader.batch_size, shuffle=True, collate_fn=loader.collate_fn
    )
    one, three = (trained(plain, loss=loss, epochs=1, shards=shards) for shards in (1, 3))
    torch.testing.assert_close(one, three)


def rows():
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": [at % 3 for at in range(N)]})


def loss_of_rows(model, batch):
    inputs = torch.stack(batch["x"], 1).float() if isinstance(batch["x"], list) else batch["x"]
    return nn.functional.cross_entropy(model(inputs), batch["y"])


def train_on_a_stream():
    stream = rows().to_iterable_dataset(num_shards=2)
    return trained(stream, batch_size=8, steps=2, shards=4, loss=loss_of_rows).tolist()


@pytest.mark.slow
def test_a_stream_of_hugging_face_with_fewer_shards_is_read_whole():
    plain = in_a_plain_loop(itertools.islice(DataLoader(rows(), 8), 2), loss_of_rows)
    ours = train_on_a_stream()
    torch.testing.assert_close(torch.tensor(ours), plain)
    assert unisono.launch(train_on_a_stream, workers=3) == [ours] * 3

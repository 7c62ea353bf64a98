"""A loss over the whole global batch: the bits of a plain loop, on any number of workers."""

import os
import signal

import pytest
import torch
import torch.nn.functional as F
from tests.once import computed_once
from torch import nn
from torch.utils.data import TensorDataset

import unisono

BATCH_SIZE = 12


class Towers(nn.Module):
    """Two encoders and a temperature, as CLIP has them."""

    def __init__(self, norm=True):
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left, right):
        return F.normalize(self.left(left), dim=1), F.normalize(self.norm(self.right(right)), dim=1)


def data():
    generator = torch.Generator().manual_seed(5)
    left = torch.randn(34, 6, generator=generator)
    return TensorDataset(left, left[:, :5] + 0.1 * torch.randn(34, 5, generator=generator))


def embed(model, batch):
    return model(*batch)


def contrast(model, features):
    left, right = features
    logits = model.scale * left @ right.T
    labels = torch.arange(len(logits), device=logits.device)
    found = (logits.argmax(1) == labels).float().mean()
    return {
        "loss": (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2,
        "found": found,
    }


def make(shards, contrast=contrast, embed=embed, optimizer=torch.optim.Adam, norm=True, **options):
    torch.manual_seed(3)
    model = Towers(norm)
    made = optimizer(model.parameters(), lr=0.02)
    loss = unisono.WholeBatch(embed, contrast)
    return unisono.Trainer(model, made, loss, shards=shards, **options)


def train(shards=4, steps=6, **options):
    trainer = make(shards, **options)
    trainer.fit(data(), batch_size=BATCH_SIZE, steps=steps, shuffle=False)
    return trainer.digest()


def test_one_shard_has_the_bits_of_a_plain_loop():
    trainer = make(1, optimizer=torch.optim.SGD)
    trainer.run.model.left[2].p = 0.0
    torch.manual_seed(3)
    model = Towers()
    model.left[2].p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    dataset = data()
    for step in range(6):
        start = step * BATCH_SIZE % 36
        optimizer.zero_grad()
        contrast(model, embed(model, dataset[start : start + BATCH_SIZE]))["loss"].backward()
        optimizer.step()
    trainer.fit(dataset, batch_size=BATCH_SIZE, steps=6, shuffle=False)
    for name, mine in trainer.run.model.state_dict().items():  # buffers as well
        assert torch.equal(mine, model.state_dict()[name]), name


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_gradients_of_several_shards_are_those_of_the_whole_batch(shards):
    seen = {1: {}, shards: {}}
    for number, found in seen.items():

        def see(step, gradients, found=found):
            found |= {name: gradient.clone() for name, gradient in gradients.items()}

        trainer = make(number, on_gradients=see, norm=False)
        trainer.run.model.left[2].p = 0.0
        trainer.fit(data(), batch_size=BATCH_SIZE, steps=1, shuffle=False)
    names = dict(Towers(norm=False).named_parameters()).keys()
    assert seen[1].keys() == seen[shards].keys() == names
    for name in seen[1]:
        assert torch.allclose(seen[1][name], seen[shards][name], atol=1e-6), name


def test_means_are_those_of_the_whole_batch():
    trainer = make(3, norm=False)
    trainer.run.model.left[2].p = 0.0
    trainer.run.model.train()
    with torch.no_grad():
        expected = contrast(trainer.run.model, embed(trainer.run.model, data()[:BATCH_SIZE]))
    summary = trainer.fit(data(), batch_size=BATCH_SIZE, steps=1, shuffle=False)
    assert summary.means["loss"] == pytest.approx(expected["loss"].item(), rel=1e-6)
    assert summary.means["found"] == pytest.approx(expected["found"].item())


def test_validation_takes_features_of_whole_batches():
    trainer, dataset = make(3), data()
    found = trainer.evaluate(dataset, batch_size=BATCH_SIZE)
    model = trainer.run.model.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, 34, BATCH_SIZE):
            batch = dataset[start : start + BATCH_SIZE]
            total += contrast(model, embed(model, batch))["loss"].item() * len(batch[0])
    assert found["loss"] == pytest.approx(total / 34, rel=1e-6)
    assert set(found) == {"loss", "found"}
    metrics = {"rows": lambda left, right: len(left)}
    assert trainer.evaluate(dataset, batch_size=5, metrics=metrics, forward=embed)["rows"] == 34


@pytest.mark.slow
def test_a_loop_of_ones_own_gathers():
    trainer = make(4)
    run = trainer.run
    for step in run.steps(data(), batch_size=BATCH_SIZE, steps=6, shuffle=False):
        with step:
            step.gather(
                lambda batch: embed(run.model, batch), lambda rows: contrast(run.model, rows)
            )
    assert trainer.digest() == train()


@pytest.mark.parametrize(
    ("embed", "words"),
    [
        (
            lambda model, batch: model(*batch)[0].mean(),
            r"one row for each of the \d+ samples .* \(",
        ),
        (lambda model, batch: "words", "but returned str"),
    ],
)
def test_what_is_no_row_is_refused(embed, words):
    with pytest.raises(TypeError, match=words):
        train(embed=embed)


@pytest.mark.parametrize(
    ("contrast", "error", "words"),
    [
        (lambda model, features: {}, TypeError, 'must have "loss" in it, but the keys are'),
        (lambda model, features: 1.0, TypeError, "must return a scalar tensor, .* returned float"),
        (lambda model, features: features[0].mean(1), ValueError, "must be a scalar"),
        (lambda model, features: features[0].detach().mean(), ValueError, "has no gradient"),
        (
            lambda model, features: {
                "loss": features[0].mean(),
                "per_sample": {"x": torch.ones(2)},
            },
            TypeError,
            r"row for each of the 12 samples, but 'x' is \(2,\)",
        ),
    ],
)
def test_what_is_no_loss_is_refused(contrast, error, words):
    with pytest.raises(error, match=words):
        train(contrast=contrast)


@pytest.mark.parametrize("form", [tuple, list])
def test_features_that_are_alone_in_a_tuple_stay_there_in_validation(form):
    """The loss took the first row of the only tensor for the features, and said nothing."""
    alone = make(
        2,
        lambda model, features: features[0].square().mean(),
        lambda model, batch: form([embed(model, batch)[0]]),
    )
    plain = make(
        2,
        lambda model, features: features.square().mean(),
        lambda model, batch: embed(model, batch)[0],
    )
    found = [made.evaluate(data(), batch_size=BATCH_SIZE) for made in (alone, plain)]
    assert found[0] == found[1]


def test_an_error_in_embedding_says_where_it_was():
    with pytest.raises(KeyError) as caught:
        train(embed=lambda model, batch: {}["features"])
    place = "in step 0, in the forward pass of shard 0, over samples 0, 4, 8"
    assert caught.value.__notes__ == [f"This was {place}."]


def test_wrong_forms_are_refused_before_training():
    with pytest.raises(TypeError, match="`embed` must be a function"):
        make(2, embed=3)
    with pytest.raises(TypeError, match="`loss` must be a function"):
        make(2, contrast=3)
    run = make(2).run
    with pytest.raises(RuntimeError, match="must be called once, within `with step:`"):
        for step in run.steps(data(), batch_size=BATCH_SIZE, steps=1):
            step.gather(embed, contrast)


@computed_once()
def train_and_die(marker, call):
    """Train; rank 1 dies as it embeds a batch for the `call`-th time, once."""
    calls = []

    def embed_or_die(model, batch):
        calls.append(1)
        if len(calls) == call and os.environ.get("RANK") == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return embed(model, batch)

    return train(embed=embed_or_die)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "staged"])
@pytest.mark.parametrize("call", [3, 4])  # gathering, and in the passes after it
def test_a_worker_that_is_killed_costs_nothing(monkeypatch, tmp_path, call, exchange):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    marker = tmp_path / "killed"
    assert unisono.launch(train_and_die, marker, call, workers=3) == [train()] * 3
    assert marker.exists()

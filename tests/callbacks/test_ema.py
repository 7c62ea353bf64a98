"""The average of weights: torch's bits, on any number of workers, kept with the run."""

import pytest
import torch
from tests.parity import cases
from tests.parity.plain import PLAIN_UPDATE, plain_loop
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono
from unisono.callbacks import EMA

STEPS = 17


def mean_over_tokens(model, batch):
    tokens = batch[0]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def made(name):
    make_model, make_data, loss = (cases.MODELS | cases.OTHER_MODELS)[name]
    loss = mean_over_tokens if name == "tied" else loss
    torch.manual_seed(11)
    model = make_model()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2), make_data(), loss


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["cnn", "tied", "mixed"])
def test_it_has_the_bits_of_torchs_averaged_model(name):
    averages = []

    def update(value, model, optimizer):
        PLAIN_UPDATE(value, model, optimizer)
        if not averages:  # it begins with what it is given first
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        averages[0].update_parameters(model)

    plain_loop(name, "adam", STEPS, loss=made(name)[3], update=update)
    ema = EMA(0.9)
    model, optimizer, data, loss = made(name)
    trainer = unisono.Trainer(model, optimizer, loss, shards=1, seed=5, callbacks=[ema])
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=STEPS)
    assert same(ema.model(model).state_dict(), averages[0].module.state_dict())
    assert not same(ema.model(model).state_dict(), model.state_dict())


def train(directory=None, steps=STEPS, **options):
    model, optimizer, data, loss = made("mixed")
    ema = EMA(0.9, start=2)
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=3, directory=directory, callbacks=[ema], **options
    )
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=steps)
    means = trainer.evaluate(data, batch_size=cases.BATCH_SIZE, model=ema.model(model))
    total = sum(value.double().sum().item() for value in ema.weights.values())
    return means, total, ema.num_averaged, trainer.digest()


@pytest.mark.slow
def test_averages_of_a_large_model_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("unisono.engine.exchange.snapshots._BLOB_BYTES", 1 << 12)  # it is larger
    undisturbed = train()
    train(tmp_path, steps=7)
    assert train(tmp_path) == undisturbed


def test_a_model_with_averages_is_saved_and_the_trained_one_stays(tmp_path):
    model, optimizer, data, loss = made("cnn")
    ema = EMA(0.5)
    trainer = unisono.Trainer(model, optimizer, loss, shards=1, callbacks=[ema])
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=5)
    before = trainer.digest()
    averaged = ema.model(model)
    trainer.save(tmp_path / "averaged.safetensors", model=averaged)
    assert trainer.digest() == before
    other = cases.Cnn()
    unisono.load_weights(tmp_path / "averaged.safetensors", other)
    assert same(dict(other.named_parameters()), dict(ema.weights))


def test_other_models_are_refused():
    model, optimizer, data, loss = made("cnn")
    ema = EMA()
    trainer = unisono.Trainer(model, optimizer, loss, shards=1, callbacks=[ema])
    with pytest.raises(RuntimeError, match="there must be a step that is averaged"):
        ema.model(model)
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=1)
    with pytest.raises(ValueError, match=r"`weight` is .* in the model and missing in the average"):
        ema.model(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module"):
        trainer.evaluate(data, batch_size=4, model="averaged")


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"decay": 1.5}, ValueError, "`decay` must be between 0 and 1"),
        ({"decay": float("nan")}, ValueError, "`decay` must be between 0 and 1"),
        ({"start": -1}, ValueError, "`start`"),
        ({"start": 0.5}, TypeError, "`start`"),
    ],
)
def test_wrong_options_are_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        EMA(**options)

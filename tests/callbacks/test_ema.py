"""The average of weights: torch's bits, on any number of workers, kept with the run."""

import pytest
import torch
from tests.parity import cases
from tests.parity.plain import PLAIN_UPDATE, plain_loop
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono
from unisono.callbacks import EMA, BestCheckpoint, Callback

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


def validated(folder, steps=STEPS, directory=None):
    """Validate, and save, on averaged weights; returns what has been found, and the file's."""
    model, optimizer, data, loss = made("mixed")
    ema, best = EMA(0.9), BestCheckpoint(folder / "best.safetensors")
    seen = []

    class Compared(Callback):
        def on_validation(self, fit, means, seconds):
            assert same(dict(fit.validated_model.named_parameters()), dict(ema.weights))
            seen.append((fit.step, means["loss"]))

    callbacks = [ema, best, Compared()]
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=3, directory=directory, callbacks=callbacks
    )
    options = {"validate": data, "validate_every": 5, "validate_model": ema.model}
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=steps, **options)
    averaged, trained = (
        trainer.evaluate(data, batch_size=cases.BATCH_SIZE, model=one)["loss"]
        for one in (ema.model(model), None)
    )
    assert seen[-1] == (steps, averaged)
    assert averaged != trained
    saved = made("mixed")[0]
    unisono.load_weights(folder / "best.safetensors", saved)
    # Only the averaged parameters are others: buffers are the trained model's.
    kept = trainer.evaluate(data, batch_size=cases.BATCH_SIZE, model=saved)["loss"]
    return seen, kept, best.best, trainer.digest()


def test_validations_and_the_best_weights_may_be_of_the_average(tmp_path):
    seen, kept, best, digest = validated(tmp_path)
    assert [step for step, _ in seen] == [5, 10, 15, STEPS]
    assert kept == min(loss for _, loss in seen)
    assert best == min(loss for step, loss in seen if step != STEPS)
    validated(tmp_path, steps=7, directory=tmp_path / "run")
    assert validated(tmp_path, directory=tmp_path / "run")[1:] == (kept, best, digest)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (3, TypeError, r"`validate_model` must be a function of \(model\)"),
        (
            lambda model: {},
            TypeError,
            "`validate_model` must return a torch.nn.Module, but returned one of type dict",
        ),
    ],
)
def test_what_gives_no_model_to_validate_is_refused(given, kind, words):
    model, optimizer, data, loss = made("cnn")
    trainer = unisono.Trainer(model, optimizer, loss, shards=1)
    with pytest.raises(kind, match=words):
        trainer.fit(data, batch_size=4, steps=1, validate=data, validate_model=given)

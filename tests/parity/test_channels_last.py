"""Images with channels last: the bits of a plain loop that says so, the same on any workers."""

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from tests.parity import cases
from tests.parity.plain import check_bits, made, plain_loop, trained

import unisono
from unisono.train.channels import laid_out

STEPS = 9


def prepared(thing):
    """Do what somebody without us would write, to a model and to each tensor of a batch."""
    if isinstance(thing, torch.nn.Module) or thing.dim() == 4:
        return thing.to(memory_format=torch.channels_last)
    return thing


def train(optimizer_name, shards, steps=STEPS, channels_last=True, **options):
    options |= {"channels_last": channels_last}
    return trained("cnn with norm", optimizer_name, shards, steps, **options)


def strides_of(model):
    return [parameter.stride() for parameter in model.parameters()]


def found_by(optimizer_name, shards, **options):
    trainer = train(optimizer_name, shards, **options)
    means = trainer.evaluate(cases.images(), batch_size=16)
    return trainer.digest(), strides_of(trainer.run.model), means


@pytest.mark.parametrize("optimizer_name", ["adamw", "fused adam", "adafactor"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_one_shard_has_the_bits_of_a_plain_loop(optimizer_name, clip_norm):
    def update(value, model, optimizer):
        value.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()

    model = plain_loop("cnn with norm", optimizer_name, STEPS, prepare=prepared, update=update)
    trainer = train(optimizer_name, 1, clip_norm=clip_norm)
    check_bits(trainer, model)
    assert strides_of(trainer.run.model) == strides_of(model)
    assert not model.second.weight.is_contiguous()


@pytest.mark.slow
def test_the_same_bits_on_one_and_three_workers():
    clipped = functools.partial(found_by, clip_norm=0.05)
    alone = clipped("adamw", 4)
    assert alone[0] != clipped("adamw", 4, channels_last=False)[0]
    assert unisono.launch(clipped, "adamw", 4, workers=3) == [alone] * 3


@pytest.mark.slow
def test_a_run_goes_on_and_weights_are_saved_in_any_layout(tmp_path, capsys):
    undisturbed = train("adamw", 2).digest()
    train("adamw", 2, 4, directory=tmp_path)
    assert train("adamw", 2, directory=tmp_path).digest() == undisturbed
    train("adamw", 2, directory=tmp_path, channels_last=False)
    assert "channels_last was True in the checkpoint and is False" in capsys.readouterr().out
    model, _, loss, optimizer = made("cnn with norm", "adamw")
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, channels_last=True)
    trainer.save(tmp_path / "weights.safetensors")
    plain = cases.Cnn(norm=True)
    unisono.load_model(tmp_path / "weights.safetensors", plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def is_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


def test_rows_of_images_are_predicted_as_they_are():
    model = torch.nn.Conv2d(2, 3, 3, padding=1)
    images = torch.randn(7, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).mean(),
        shards=2,
        channels_last=True,
    )
    rows = trainer.predict(images, batch_size=4)
    torch.testing.assert_close(rows, model(images).detach())

    def forward(model, batch):
        assert is_last(batch)
        return batch

    assert torch.equal(trainer.predict(images, batch_size=4, forward=forward), images)


Pair = namedtuple("Pair", ["image", "label"])


def test_images_are_laid_out_wherever_a_batch_has_them():
    image, label = torch.randn(2, 3, 4, 5), torch.arange(2)
    assert not is_last(image)
    for batch, find in [
        (image, lambda b: b),
        ([image, label], lambda b: b[0]),
        ((label, {"x": [image]}), lambda b: b[1]["x"][0]),
        (Pair(image, label), lambda b: b.image),
        (OrderedDict(x=image, y=label), lambda b: b["x"]),
        (MappingProxyType({"x": image}), lambda b: b["x"]),
    ]:
        other = laid_out(batch)
        assert is_last(find(other))
        assert torch.equal(find(other), image)
        assert type(other) is type(batch) or isinstance(batch, Mapping)
        assert not is_last(find(batch))
    for other in (label, torch.ones(2, 3, 4, 5, dtype=torch.int64), torch.ones(3, 4), "text", None):
        assert laid_out(other) is other


@pytest.mark.parametrize(
    ("model", "channels_last", "kind", "words"),
    [
        (torch.nn.Conv3d(1, 1, 1), True, ValueError, "`weight` has five"),
        (torch.nn.Linear(1, 1), 1, TypeError, "`channels_last` must be True or False, but is 1"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(model, channels_last, kind, words):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=words):
        unisono.Trainer(model, optimizer, torch.sum, shards=1, channels_last=channels_last)

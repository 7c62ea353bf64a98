"""Images with channels last: the bits of a plain loop that says so, the same on any workers."""

import pytest
import torch
from tests.parity import cases
from tests.parity.plain import check_bits, made, plain_loop, trained, update_by

import unisono

STEPS = 9


def prepared(thing):
    """Do what somebody without us would write, to a model and to each tensor of a batch."""
    if isinstance(thing, torch.nn.Module) or thing.dim() == 4:
        return thing.to(memory_format=torch.channels_last)
    return thing


def train(optimizer_name, shards, steps=STEPS, prepare=prepared, **options):
    return trained("cnn with norm", optimizer_name, shards, steps, prepare=prepare, **options)


def as_it_is(thing):
    return thing


def strides_of(model):
    return [parameter.stride() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer_name", ["adamw", "fused adam", "adafactor"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_one_shard_has_the_bits_of_a_plain_loop(optimizer_name, clip_norm):
    update = update_by(clip_norm=clip_norm)
    model = plain_loop("cnn with norm", optimizer_name, STEPS, prepare=prepared, update=update)
    trainer = train(optimizer_name, 1, clip_norm=clip_norm)
    check_bits(trainer, model)
    assert strides_of(trainer.run.model) == strides_of(model)
    assert not model.second.weight.is_contiguous()


@pytest.mark.slow
def test_a_run_goes_on_and_weights_are_saved_in_any_layout(tmp_path, capsys):
    undisturbed = train("adamw", 2).digest()
    train("adamw", 2, 4, directory=tmp_path)
    assert train("adamw", 2, directory=tmp_path).digest() == undisturbed
    train("adamw", 2, directory=tmp_path, prepare=as_it_is)
    assert "channels_last was True in the checkpoint and is False" in capsys.readouterr().out
    model, _, loss, optimizer = made("cnn with norm", "adamw")
    trainer = unisono.Trainer(prepared(model), optimizer, loss, shards=2)
    trainer.save(tmp_path / "weights.safetensors")
    plain = cases.Cnn(norm=True)
    unisono.load_weights(tmp_path / "weights.safetensors", plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])

import os

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.classified import at_random
from tests.classified import with_accuracy as loss_of
from torch import nn

import unisono


def data(num_samples=50):
    return at_random(num_samples, 4, 2, seed=0)


def make(shards=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    return unisono.Trainer(model, torch.optim.Adam(model.parameters()), loss_of, shards=shards)


def test_fit_says_what_it_did(capsys):
    trainer = make()
    summary = trainer.fit(data(), batch_size=10, epochs=2, validate=data(20))
    assert (summary.steps, summary.samples, summary.shards, summary.workers) == (10, 100, 3, 1)
    assert summary.digest == trainer.digest()
    assert summary.validation.keys() == {"loss", "accuracy"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(summary)
    assert "3 shards on 1 worker" in lines[-1]
    assert summary.digest[:16] in lines[-1]
    assert sum("validation loss" in line for line in lines) == 2


def save_in_a_worker(path):
    trainer = make()
    trainer.fit(data(), batch_size=10, epochs=1)
    trainer.save(path)
    return os.path.exists(path)


@pytest.mark.slow
def test_saving_makes_the_folder_or_fails_on_every_worker(tmp_path):
    path = tmp_path / "new" / "model.safetensors"
    assert unisono.launch(save_in_a_worker, path, workers=2) == [True, True]
    with pytest.raises(OSError, match=r"folder that can be made and written.*\(File exists"):
        unisono.launch(save_in_a_worker, path / "model.safetensors", workers=2)


def test_tied_weights_are_saved_once(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    trainer = unisono.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m["b"](b).mean(), shards=1
    )
    trainer.save(tmp_path / "tied.safetensors")
    assert load_file(tmp_path / "tied.safetensors").keys() == {"a.weight", "a.bias", "b.bias"}


def different_starts():
    torch.manual_seed(unisono.world().rank)
    model = nn.Linear(4, 2)
    model.register_buffer("noise", torch.randn(3))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    whole = nn.Sequential(model, frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(
        whole, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), shards=2
    )
    trainer.fit(data(), batch_size=10, epochs=1)
    return [tensor.tolist() for tensor in whole.state_dict().values()]


@pytest.mark.slow
def test_everybody_starts_from_rank_0():
    one, other = unisono.launch(different_starts, workers=2)
    assert one == other

"""A compiled forward pass: one result on any number of workers, under the plain model's names."""

import threading

import pytest
import torch
from tests.classified import by_sign
from tests.classified import cross_entropy as loss

import unisono


def data():
    return by_sign(98, 40, seed=2)


def make(prepare=lambda model: model, **options):
    torch.manual_seed(4)
    # Sequential: compiling a model of a class of torch's own takes a step more.
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 64),
        torch.nn.LayerNorm(64),
        torch.nn.GELU(),
        torch.nn.BatchNorm1d(64),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(64, 10),
    )
    model = prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    return unisono.Trainer(model, optimizer, loss, shards=3, **options)


def train(steps=4, **options):
    """Train on shards of 17, 16 and 16 samples: of three workers none sees both."""
    trainer = make(**{"compile": True, **options})
    trainer.fit(data(), batch_size=49, steps=steps)
    return trainer.digest(), sorted(trainer.run.model.state_dict())


def train_both():
    """Train what the trainer compiles, then what the program has compiled as torch's pages say."""
    return train()[0], train(prepare=torch.compile, compile=False)[0]


def train_alone(directory):
    """Train in one worker, where others than compiled models read the checkpoint."""
    threads = set(threading.enumerate())
    alone = train(directory=directory)
    assert train(directory=directory, compile=False) == alone  # names, too; no step is left to do
    assert train(compile=False)[0] != alone[0]
    assert set(threading.enumerate()) == threads
    return alone[0], train(prepare=torch.compile, compile=False)[0]


@pytest.mark.long  # half a minute, or two where nothing is in torch's cache
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_bits_on_one_and_more_workers(tmp_path, workers):
    [alone] = unisono.launch(train_alone, tmp_path, workers=1)
    assert unisono.launch(train_both, workers=workers) == [alone] * workers


@pytest.mark.parametrize("name", ["/nowhere/g++", "false"])
def test_a_missing_compiler_is_told_before_training(monkeypatch, name):
    monkeypatch.setenv("CXX", name)
    with pytest.raises(ValueError, match=rf"needs a C\+\+ compiler on the CPU, but .* `{name}"):
        make(compile=True)
    make()


def test_a_compiled_model_is_not_compiled_again():
    model = torch.nn.Linear(1, 1)
    model._orig_mod = torch.nn.Linear(1, 1)  # as what `torch.compile` makes has
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="pass the plain model"):
        unisono.Trainer(model, optimizer, torch.sum, shards=1, compile=True)
    with pytest.raises(TypeError, match="`compile` must be True or False, but is 'yes'"):
        unisono.Trainer(model, optimizer, torch.sum, shards=1, compile="yes")

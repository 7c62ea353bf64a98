"""A compiled forward pass: one result on any number of workers, under the plain model's names."""

import threading

import pytest
import torch
from tests.classified import by_sign
from tests.classified import cross_entropy as loss

import unisono


def data():
    return by_sign(98, 40, seed=2)


class Net(torch.nn.Sequential):
    """`model.compile()` compiles nothing where the model is of a class of torch's own."""

    def forward(self, x):
        return super().forward(x)


def make(prepare=lambda model: model, **options):
    torch.manual_seed(4)
    model = Net(
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


def in_place(model):
    model.compile()
    return model


def plain(model):
    return model


def train(prepare=in_place, steps=4, **options):
    """Train on shards of 17, 16 and 16 samples: of three workers none sees both."""
    trainer = make(prepare, **options)
    trainer.fit(data(), batch_size=49, steps=steps)
    return trainer.digest(), sorted(trainer.run.model.state_dict())


def train_both():
    return train()[0], train(torch.compile)[0]


def threads():
    """List threads, but for that of torch's progress bar where a compiler is slow."""
    return [thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"]


def train_alone(directory):
    """Train in one worker, where others than compiled models read the checkpoint."""
    before = set(threads())
    alone = train(directory=directory)
    assert train(plain, directory=directory) == alone  # names, too; no step is left to do
    assert train(plain)[0] != alone[0]
    assert set(threads()) == before
    return alone[0], train(torch.compile)[0]


@pytest.mark.long  # half a minute, or two where nothing is in torch's cache
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_bits_on_one_and_more_workers(tmp_path, workers):
    [alone] = unisono.launch(train_alone, tmp_path, workers=1)
    assert unisono.launch(train_both, workers=workers) == [alone] * workers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it is imported
def test_the_compiler_belongs_to_the_identity(monkeypatch):
    assert make().run.fixed["compile"] is None
    for prepare in (in_place, torch.compile):
        assert "g++" in make(prepare).run.fixed["compile"]
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert make(in_place).run.fixed["compile"] == ""

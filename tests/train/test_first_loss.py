"""A resumed run reports that its program computes something else than the checkpoint's."""

import pytest
import torch
from tests.promises import promise
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.training import first_loss

REPORT = "the program computes something else than the one that wrote the checkpoint"


def train(directory, epochs, factor=1.0, seed=0, data_seed=0, learning_rate=0.1):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(data_seed))

    def loss(model, batch):
        print("a loss that prints")
        return factor * model(batch[0]).pow(2).mean()

    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, directory=directory)
    trainer.fit(TensorDataset(rows), batch_size=8, epochs=epochs)
    return trainer.digest()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(first_loss, "_WITHIN_S", 30.0)


@promise("conditions.1")
def test_another_loss_is_reported_once(tmp_path, capfd):
    train(tmp_path, 1)
    train(tmp_path, 2, factor=2.0)
    said = "".join(capfd.readouterr())
    assert f"{REPORT}: with the same first weights, the loss of a sample was 0." in said
    train(tmp_path, 3, factor=2.0)
    assert REPORT not in "".join(capfd.readouterr())


def test_the_same_program_and_other_options_are_not_reported(tmp_path, capfd):
    train(tmp_path, 1)
    train(tmp_path, 2, learning_rate=0.2)
    train(tmp_path, 3, seed=1)  # so another loss says nothing
    assert REPORT not in "".join(capfd.readouterr())


def test_nothing_changes_here(tmp_path, capfd):
    here = train(None, 1)
    num_lines = capfd.readouterr().out.count("a loss that prints")
    assert train(tmp_path, 1) == here
    assert capfd.readouterr().out.count("a loss that prints") == num_lines


@pytest.mark.parametrize("trouble", [OSError("no process"), MemoryError()])
def test_a_process_that_cannot_be_had_ends_no_run(tmp_path, monkeypatch, trouble):
    def fail(*_):
        raise trouble

    monkeypatch.setattr(first_loss, "LoaderProcesses", fail)
    train(tmp_path, 1)

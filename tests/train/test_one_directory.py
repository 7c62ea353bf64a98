"""Folds and searches that share a directory are refused; one that runs again is not."""

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import unisono
from unisono.errors import CheckpointError
from unisono.training import resume

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())


def train(directory, *, data=DATA, seed=0, lr=0.1, epochs=2, **options):
    torch.manual_seed(seed)
    model = nn.Linear(8, 2)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, directory=directory, **options)
    return trainer.fit(data, batch_size=16, epochs=epochs).digest


FOLDS = [Subset(DATA, range(32)), Subset(DATA, range(32, 64))]


@pytest.mark.parametrize("epochs", [2, 3])
def test_another_fold_in_the_same_directory_is_refused_with_the_remedy(tmp_path, epochs):
    train(tmp_path / "run", data=FOLDS[0])
    with pytest.raises(CheckpointError, match="a directory for each"):
        train(tmp_path / "run", data=FOLDS[1], seed=1, epochs=epochs)
    alone = train(None, data=FOLDS[1], seed=1)
    assert train(tmp_path / "run 1", data=FOLDS[1], seed=1) == alone


@pytest.mark.parametrize("another", [{"seed": 1}, {"lr": 0.2}])
def test_another_trial_in_the_same_directory_is_refused_with_the_remedy(tmp_path, another):
    train(tmp_path / "run")
    with pytest.raises(CheckpointError, match="a directory for each"):
        train(tmp_path / "run", **another)
    assert train(tmp_path / "run 1", **another) == train(None, **another)


def test_the_same_trainer_again_has_nothing_to_do_or_goes_on(tmp_path):
    once = train(tmp_path)
    assert train(tmp_path) == once
    assert train(tmp_path, epochs=3) == train(None, epochs=3)


def test_another_trial_takes_the_first_ones_weights_where_it_says_so(tmp_path):
    once = train(tmp_path)
    program = unisono.Checkpoint(options="program")
    assert train(tmp_path, checkpoint=program, lr=0.1, seed=1) == once


def test_a_cell_that_is_run_again_without_a_seed_has_nothing_to_do(tmp_path, monkeypatch):
    once = train(tmp_path)
    monkeypatch.setattr(resume, "in_notebook", lambda: True)
    assert train(tmp_path, seed=1) == once

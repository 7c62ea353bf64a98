"""Two real workers: the end of ``fit`` names a slow one and a slow data set, and else nothing."""

import re
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unisono

STEPS = 120
PLANTED_S = 0.01  # several steps


class Samples(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self._x, self._seconds = torch.randn(512, 64), seconds

    def __len__(self):
        return len(self._x)

    def __getitems__(self, numbers):
        time.sleep(self._seconds)
        return [self._x[number] for number in numbers]


def busy(seconds):
    """Use the core, however much of it others leave."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def fit(directory, loading_s=0.0, forward_s=0.0):
    def loss(model, batch):
        busy(forward_s)
        return F.mse_loss(model(batch), batch)

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, directory=directory)
    trainer.fit(Samples(loading_s), batch_size=32, steps=STEPS)


def fits(directory):
    rank = unisono.world().rank
    fit(directory / "even")
    print("--" * (rank == 0))
    fit(directory / "slow worker", forward_s=PLANTED_S * (rank == 1))
    print("--" * (rank == 0))
    fit(directory / "slow loader", loading_s=PLANTED_S)


@pytest.mark.slow
def test_the_end_of_fit_names_a_slow_worker_and_a_slow_loader(tmp_path, capfd):
    unisono.launch(fits, tmp_path, workers=2)
    even, worker, loader = capfd.readouterr().out.split("--\n")
    assert "is slow in" not in even
    assert re.search(r"^worker 1 is slow in its forward pass: .* ms more than", worker, re.M)
    assert re.search(r"^loading takes .* a step's .*`num_workers=1`$", loader, re.M)
    assert "is slow in" not in loader

"""Gloo is loaded where it is chosen; gradients that come twice in a pass are whole."""

import sys
import time

import pytest
import torch
from tests.warm import processes
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import unisono
from unisono.engine.exchange.choice import EXCHANGE_VARIABLE
from unisono.engine.exchange.host_memory import HostMemoryCarriage
from unisono.engine.state.contents import digest_of

pytestmark = pytest.mark.slow


def test_gloo_is_needed_by_those_alone_who_choose_a_group():
    unused = "unisono.engine.exchange.gloo_communicator"
    code = f"import sys, unisono.training.trainer; assert {unused!r} not in sys.modules"
    processes.run([sys.executable, "-c", code], check=True)


class Recomputed(nn.Module):
    """A layer that two segments share, whose gradient comes once for each: twice in a pass."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(36, 600), nn.Linear(600, 600)  # more than a bucket
        self.last = nn.Linear(600, 3)

    def forward(self, inputs):
        values = self.first(inputs.flatten(1))
        for _ in range(2):
            values = checkpoint(lambda x: self.shared(x).tanh(), values, use_reentrant=True)
        return self.last(values)


def train_recomputed():
    torch.manual_seed(11)
    model = Recomputed()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = unisono.Run(model, optimizer, shards=4)
    data = TensorDataset(torch.randn(32, 6, 6), torch.randint(3, (32,)))
    for step in run.steps(data, batch_size=8, epochs=2):
        with step:
            for inputs, targets in step.shards:
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
    return digest_of(model, optimizer)


def train_with_a_slow_reader():
    """Worker 1 copies the sums of the last step when worker 0 has done with the loop."""
    if unisono.world().rank == 1:
        take = HostMemoryCarriage.copy_sums_from_host

        def slow(carriage, *, with_own):
            time.sleep(0.03)
            take(carriage, with_own=with_own)

        HostMemoryCarriage.copy_sums_from_host = slow
    return train_recomputed()


def test_sums_stay_until_all_have_read_them(monkeypatch):
    expected = train_recomputed()
    monkeypatch.setenv(EXCHANGE_VARIABLE, "staged")
    assert unisono.launch(train_with_a_slow_reader, workers=2) == [expected] * 2


def test_gradients_that_come_twice_in_a_pass_are_whole(monkeypatch):
    expected = train_recomputed()
    for exchange in ("gloo", "staged"):
        monkeypatch.setenv(EXCHANGE_VARIABLE, exchange)
        assert unisono.launch(train_recomputed, workers=2) == [expected] * 2

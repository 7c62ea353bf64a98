"""A program reads a step's results behind its block, whether or not a worker was lost in it."""

import math

import pytest
import torch
from tests.promises import promise
from torch import nn
from torch.utils.data import TensorDataset

import unisono

STEPS = 250


def adversarial():
    """Train two models, without a look at `is_done`; returns what was read, and the digest."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 8))
    models = {"g": nn.Linear(4, 8), "d": nn.Linear(8, 1)}
    g, d = models.values()
    optimizers = {name: torch.optim.Adam(one.parameters()) for name, one in models.items()}
    run = unisono.Run(models, optimizers, shards=4)
    seen = []
    for step in run.steps(data, batch_size=8, steps=STEPS):
        with step:
            with step.update("d"):
                for (real,) in step.shards:
                    made = g(torch.randn(len(real), 4)).detach()
                    step.backward(d(made).mean() - d(real).mean())
            of_d = step.loss
            with step.update("g"):
                for (real,) in step.shards:
                    step.backward(-d(g(torch.randn(len(real), 4))).mean())
        seen.append((step.number, step.loss, step.means["d.loss"], step.means["g.loss"], of_d))
        assert all(map(math.isfinite, seen[-1]))
    return seen, run.digest()


@promise("conditions.6")
@pytest.mark.slow
@pytest.mark.parametrize("at", ["sums", "update", "updated"])
@pytest.mark.parametrize("exchange", ["shared", "zero"])
def test_what_an_undone_step_has_shown_is_undone(monkeypatch, capfd, at, exchange):
    found = adversarial()
    assert [step for step, *_ in found[0]] == list(range(STEPS))
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank=1,step=30,at={at}")
    assert unisono.launch(adversarial, workers=2) == [found] * 2
    assert "worker 1" in (joined := capfd.readouterr().err.splitlines()[-1])
    assert "has joined" in joined, "the replacement must have joined in the midst"

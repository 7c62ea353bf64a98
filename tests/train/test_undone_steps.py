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


def followed(of_optimizer):
    """Change after each step's block what a run keeps, without a look at `is_done`."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 8))
    online, target = nn.Linear(8, 2), nn.Linear(8, 2)
    target.requires_grad_(False)
    model = nn.ModuleDict({"online": online, "target": target})
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("steps", torch.zeros(()), persistent=False)
    optimizer = torch.optim.Adam(online.parameters())
    run = unisono.Run(model, optimizer, shards=4)
    for step in run.steps(data, batch_size=8, steps=STEPS):
        with step:
            for (x,) in step.shards:
                rate = optimizer.param_groups[0].get("rate", 1.0)
                step.backward(rate * (online(x) - target(x) - model.mean - 1).square().mean())
        with torch.no_grad():
            target.weight.lerp_(online.weight, 0.1)
            online.weight.mul_(0.99)
            model.mean.mul_(0.9).add_(online.bias, alpha=0.1)
            model._buffers["steps"] = model.steps + 1
            for state in optimizer.state.values() if of_optimizer else ():
                state["exp_avg"].mul_(0.9)
        if step.number % 10 == 9:
            optimizer.param_groups[0]["rate"] = 1.0 + step.number / STEPS
    return run.digest()


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "zero", "staged"])
def test_changes_after_the_block_of_an_undone_step_are_undone(monkeypatch, capfd, exchange):
    of_optimizer = exchange != "zero"
    found = followed(of_optimizer)
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=33,at=updated")
    assert unisono.launch(followed, of_optimizer, workers=2) == [found] * 2
    assert "has joined" in capfd.readouterr().err


def left(because):
    """Leave a loop by a `break` after a step, by its number or by a time that has come."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=4)
    for step in run.steps(TensorDataset(torch.randn(96, 8)), batch_size=8, steps=STEPS):
        with step:
            for (x,) in step.shards:
                step.backward(model(x).square().mean())
        if step.number == 60 if because == "number" else not step.is_done or step.number == 200:
            break
    return run.position.step, run.digest()


@pytest.mark.slow
def test_a_break_after_an_undone_step_leaves_the_loop_where_it_would_have_been_left(monkeypatch):
    found = left("number")
    assert found[0] == 61
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=60,at=updated")
    assert unisono.launch(left, "number", workers=2) == [found] * 2


@pytest.mark.slow
def test_a_loop_that_is_left_after_an_undone_step_starts_again(monkeypatch, capfd):
    found = left("undone")
    assert found[0] == 201
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=60,at=updated")
    assert unisono.launch(left, "undone", workers=2) == [found] * 2
    assert "left its loop after a step that was undone" in " ".join(capfd.readouterr().err.split())

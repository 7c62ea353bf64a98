"""Buffers that forward passes count or average in have a plain loop's values, by one word."""

import functools

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from tests.everywhere import Waits, one_result
from torch import nn

import unisono

WAYS = {"seen": "sum", "centre": "mean", "highest": "max", "*.load": "sum", "calls": "first"}


class Expert(nn.Linear):
    """Counts how often each class was chosen, in float as mixtures of experts do."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("load", torch.zeros(2))

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if self.training:
            chosen = outputs.detach().argmax(1)
            self.load += nn.functional.one_hot(chosen, 2).sum(0)
        return outputs


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = Expert()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("highest", torch.full((4,), -torch.inf))

    def forward(self, inputs):
        centre = self.centre  # the step's: what a shard makes of it is the shard's own
        if self.training:
            self.seen += len(inputs)
            self.calls += 1
            self.centre = 0.9 * self.centre + 0.1 * inputs.mean(0)
            self.highest.copy_(torch.maximum(self.highest, inputs.amax(0)))
        return self.expert(inputs - 0.1 * centre)


def by_a_plain_loop(steps):
    torch.manual_seed(0)
    model, data = Counting(), by_sign(34)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        start = step * 12 % 36
        optimizer.zero_grad()
        cross_entropy(model, data[start : start + 12]).backward()
        optimizer.step()
    return model.state_dict()


def train(shards, steps, directory=None, by_loop=False):
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by_loop:
        run = unisono.Run(model, optimizer, shards=shards, buffers=WAYS)
        for step in run.steps(by_sign(34), batch_size=12, steps=steps, shuffle=False):
            with step:
                for batch in step.shards:
                    step.backward(cross_entropy(model, batch))
    else:
        options = {"directory": directory, "callbacks": [Waits()], "buffers": WAYS}
        trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=shards, **options)
        trainer.fit(by_sign(34), batch_size=12, steps=steps, shuffle=False)
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("by_loop", [False, True])
@pytest.mark.parametrize("shards", [1, 6])
def test_they_end_with_the_values_of_a_plain_loop(shards, by_loop):
    found = train(shards, 7, by_loop=by_loop)
    for name, expected in by_a_plain_loop(7).items():
        mine = torch.tensor(found[name], dtype=expected.dtype)
        assert torch.allclose(mine, expected, atol=1e-6), name
        is_exact = shards == 1 or name in ("seen", "calls", "highest", "expert.load")
        assert not is_exact or torch.equal(mine, expected), name


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "staged"])
def test_they_are_the_same_in_every_way(exchange, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    one_result(functools.partial(train, 6), monkeypatch, tmp_path)


def test_a_closure_and_another_way_on_resuming_are_refused(tmp_path):
    model = Counting()
    with pytest.raises(ValueError, match="a closure changes buffers in each evaluation"):
        unisono.Run(model, torch.optim.LBFGS(model.parameters()), buffers={"seen": "sum"})
    with pytest.raises(ValueError, match="'unknown' is none of"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        unisono.Run(model, optimizer, buffers={"unknown": "sum"})

"""`buffer.data = new` is a change like any other, between steps and in passes."""

import functools

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from tests.everywhere import Waits, one_result
from torch import nn

import unisono
from unisono.callbacks import Callback


class Centred(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        if self.training:
            self.scale.data = self.scale * 0.9
        return super().forward((inputs - self.centre) * self.scale)


def move(model):
    """Replace a buffer's data from its own values and from what is trained."""
    model.centre.data = 0.9 * model.centre + 0.1 * model.weight.detach().mean(0)


class Moves(Callback):
    def on_step_end(self, fit, step):
        move(fit.model)


def by_a_plain_loop(steps):
    torch.manual_seed(0)
    model, data = Centred(), by_sign(36)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        start = step * 12 % 36
        optimizer.zero_grad()
        cross_entropy(model, data[start : start + 12]).backward()
        optimizer.step()
        move(model)
    return model.state_dict()


def train(shards, steps, directory=None):
    torch.manual_seed(0)
    model = Centred()
    optimizer = torch.optim.Adam(model.parameters())
    options = {"directory": directory, "callbacks": [Moves(), Waits()]}
    trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=shards, **options)
    trainer.fit(by_sign(36), batch_size=12, steps=steps, shuffle=False)
    assert not any(value.is_shared() for value in model.state_dict().values())
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("shards", [1, 6])
def test_replaced_data_counts_as_in_a_plain_loop(shards):
    for name, expected in by_a_plain_loop(8).items():
        mine = torch.tensor(train(shards, 8)[name])
        assert torch.allclose(mine, expected, atol=1e-6), name
        assert shards > 1 or torch.equal(mine, expected), name


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "staged"])
def test_replaced_data_is_the_same_in_every_way(exchange, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    one_result(functools.partial(train, 6), monkeypatch, tmp_path)


def test_data_of_another_shape_is_refused_by_name():
    def reshaped(model, batch):
        model.centre.data = torch.zeros(3)
        return cross_entropy(model, batch)

    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = r"a buffer must keep its shape .* `centre` was \(4,\) of torch.float32 and is \(3,\)"
    with pytest.raises((ValueError, RuntimeError), match=words):
        unisono.Trainer(model, optimizer, reshaped, shards=2).fit(
            by_sign(36), batch_size=6, steps=1
        )

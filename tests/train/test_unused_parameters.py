"""Parameters that get no gradient are named once, after some steps."""

import pytest
import torch
from tests.classified import taken
from tests.once import computed_once
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.training.first_steps import STEPS, in_words

WORDS = "`forgotten.weight`, `forgotten.bias` have had no gradient in 8 steps, so the optimizer"


class Net(nn.Module):
    def __init__(self, uses_forgotten_in=None):
        super().__init__()
        self.used, self.forgotten = nn.Linear(2, 2), nn.Linear(2, 2)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)
        self.uses_forgotten_in, self.calls = uses_forgotten_in, 0

    def forward(self, x):
        x = self.used(x)
        if self.uses_forgotten_in is None:
            return x
        self.calls += 1
        return self.forgotten(x) if self.calls == self.uses_forgotten_in else x


def said(capfd, steps=STEPS, times=1, **options):
    model = Net(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=1, seed=0)
    for time in range(1, times + 1):
        with computed_once():
            trainer.fit(TensorDataset(torch.ones(100, 2)), batch_size=2, steps=steps * time)
    return "".join(capfd.readouterr())


def loss(model, batch):
    return model(batch[0]).mean()


def test_they_are_named_once(capfd):
    assert said(capfd, times=2).count(WORDS) == 1


@pytest.mark.parametrize("options", [{"steps": STEPS - 1}, {"uses_forgotten_in": 5}])
def test_too_few_steps_and_parts_that_are_used_sometimes_are_not(capfd, options):
    assert "no gradient" not in said(capfd, **options)


def test_words():
    assert in_words(["a"]).startswith(
        "`a` has had no gradient in 8 steps, so the optimizer leaves it"
    )
    assert "`h` and 2 more have" in in_words("abcdefghij")


@pytest.mark.slow
def test_one_of_several_workers_says_it(capfd):
    def train():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = unisono.Run(model, optimizer, shards=2)
        list(taken(run, loss, TensorDataset(torch.ones(40, 2)), batch_size=4, epochs=1))

    unisono.launch(train, workers=2)
    assert "".join(capfd.readouterr()).count(WORDS) == 1

"""Gradients given by name: to one of several optimizers, and those that are refused."""

import copy

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from torch import nn

import unisono
from unisono.errors import MismatchError


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def test_one_of_several_optimizers_is_given_them():
    models = {"inner": net(), "outer": net()}
    optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.1) for name, one in models.items()}
    run = unisono.Run(models, optimizers, shards=2)
    before = copy.deepcopy(models["outer"])
    for step in run.steps(by_sign(16), batch_size=8, steps=1):
        with step:
            with step.update("inner"):
                for batch in step.shards:
                    step.backward(cross_entropy(models["inner"], batch))
            gradients = {"outer.weight": torch.ones(2, 4), "outer.bias": torch.ones(2)}
            with step.update("outer", gradients=gradients):
                pass
    for mine, was in zip(models["outer"].parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, was - 0.1 * torch.ones_like(was))


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ({"wieght": torch.ones(2, 4)}, "'wieght' is none of the 2, such as 'weight'"),
        ({"weight": torch.ones(4)}, r"that of 'weight' is torch.Size\(\[4\]\) instead of"),
        (None, "or give it `gradients`, without a name"),
    ],
)
def test_what_does_not_fit_is_refused(gradients, words):
    model = net()
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    with pytest.raises(ValueError, match=words):
        for step in run.steps(by_sign(16), batch_size=8, steps=1):
            with step:
                step.update(gradients=gradients)


def differ():
    model = net()
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    for step in run.steps(by_sign(16), batch_size=8, steps=1):
        with step:
            step.update(gradients={"bias": torch.full((2,), float(unisono.world().rank))})


@pytest.mark.slow
def test_workers_that_give_others_are_told():
    with pytest.raises(MismatchError, match="must be given the same gradients on every worker"):
        unisono.launch(differ, workers=2)

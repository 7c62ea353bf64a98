"""Updates whose gradient is no sum over shards, as Reptile's outer step, given by name."""

import copy

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from tests.replacements import wait_for_replacement
from torch import nn

import unisono
from unisono.errors import MismatchError
from unisono.runtime.workers.context import context

KILLS = "kill:rank=0,step=2,at=update; kill:rank=1,step=4"


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def task(number):
    return by_sign(12, seed=number)[:12]


def outer_gradients(model, number):
    """Train a copy on one task; the way back is the gradient."""
    inner = copy.deepcopy(model)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(inner, task(number)).backward()
        optimizer.step()
    pairs = zip(model.named_parameters(), inner.parameters(), strict=True)
    return {name: (here - there).detach() for (name, here), there in pairs}


def given(model, number):
    """Rest the bias in every third step, and skip the fourth."""
    gradients = outer_gradients(model, number)
    if number == 3:
        return {}
    return gradients if number % 3 else {"weight": gradients["weight"]}


def by_a_plain_loop(steps):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for number in range(steps):
        gradients = given(model, number)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(name)
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def train(shards, steps, directory=None):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = unisono.Run(model, optimizer, shards=shards, directory=directory)
    for step in run.steps(by_sign(16), batch_size=8, steps=steps):
        wait_for_replacement(context().team())
        gradients = given(model, step.number)
        with step:
            step.update(gradients=gradients)
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("shards", [1, 6])
def test_they_are_used_as_in_a_plain_loop(shards):
    assert train(shards, 7) == by_a_plain_loop(7)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "staged"])
def test_they_are_used_once_in_every_way(exchange, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    expected = by_a_plain_loop(8)
    for workers in (2, 3):
        assert unisono.launch(train, 6, 8, workers=workers) == [expected] * workers
    unisono.launch(train, 6, 4, tmp_path, workers=3)
    assert train(6, 8, tmp_path) == expected
    monkeypatch.setenv("UNISONO_FAULTS", KILLS)
    assert unisono.launch(train, 6, 8, workers=2) == [expected] * 2


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

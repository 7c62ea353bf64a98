"""What the body of a loop over `step.shards` keeps, and whether the loss is computed from it."""

import ast
import collections
import random

import pytest
import torch
from tests.classified import at_random
from torch import nn
from torch.nn.functional import cross_entropy

import unisono
from unisono.training.loop_body import _needed_in

UNUSUAL = {
    "t = f(x)\nstep.backward(t)": ([], ["f", "step", "step.backward"]),
    "n += 1\nstep.backward(f(x, n))": (["n"], ["f", "step", "step.backward"]),
    "self.n += 1\nstep.backward(self.n)": (["self.n"], ["self", "step", "step.backward"]),
    "step.backward(f(x, h := g(h)))": (["h"], ["f", "g", "step", "step.backward"]),
    "y, h = g(x, h)\nstep.backward(y)": (["h"], ["g", "step", "step.backward"]),
    "step.backward(sum(a * x for a in w))": ([], ["step", "step.backward", "sum", "w"]),
    "step.backward(f(key=lambda a: a + b))\na = b = 1": (["b"], ["f", "step", "step.backward"]),
    "for a in w:\n  t = a\nstep.backward(t)": ([], ["step", "step.backward", "w"]),
    "with f(x) as t:\n  step.backward(t)\nt.close()": ([], ["f", "step", "step.backward"]),
    "total += f(x)\nprint(total)": ([], []),
    "w[n] = x\nn: int = n + 1\nstep.backward(w[n])": (["n"], ["step", "step.backward", "w"]),
}


@pytest.mark.parametrize("body", UNUSUAL)
def test_what_a_loss_is_computed_from(body):
    lines = "".join(f"  {line}\n" for line in body.splitlines())
    needed = _needed_in(ast.parse(f"for x in step.shards:\n{lines}").body[0])
    assert (list(needed.carried), list(needed.read)) == UNUSUAL[body]


class Model(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs):
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return super().forward(inputs - self.mean)


def made():
    torch.manual_seed(0)
    model = Model()
    return model, unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)


def steps(run):
    return run.steps(at_random(24, 8, 4, seed=3), batch_size=8, steps=3)


def counted():
    (model, run), n = made(), 0
    for step in steps(run):
        with step:
            for x, y in step.shards:
                n += 1
                step.backward(cross_entropy(model(x), y) * (1 + n / 100))


def averaged():
    (model, run), mean = made(), 1.0
    for step in steps(run):
        with step:
            for x, y in step.shards:
                loss = cross_entropy(model(x), y)
                mean = 0.9 * mean + 0.1 * loss.item()
                step.backward(loss / mean)


def remembered():
    (model, run), memory = made(), collections.deque(maxlen=100)
    for step in steps(run):
        with step:
            for batch in step.shards:
                memory.extend(zip(*batch, strict=True))
                x, y = map(torch.stack, zip(*random.sample(memory, 4), strict=True))
                step.backward(cross_entropy(model(x), y))


def written():
    (model, run), centers = made(), torch.zeros(4)
    for step in steps(run):
        with step:
            for x, y in step.shards:
                found = model(x)
                step.backward(cross_entropy(found, y) + (found - centers).square().mean())
                centers.lerp_(found.detach().mean(0), 0.5)


class Training:
    def __init__(self):
        self.model, self.run = made()
        self.count = 0

    def train(self):
        for step in steps(self.run):
            with step:
                for x, y in step.shards:
                    self.count += 1
                    step.backward(cross_entropy(self.model(x), y) * self.count)


REFUSED = {
    counted: "`n`",
    averaged: "`mean`",
    remembered: "`memory`",
    written: "`centers`",
    lambda: Training().train(): "`self.count`",
}


@pytest.mark.parametrize("train", REFUSED)
def test_a_loss_that_depends_on_the_shard_before_is_refused_by_name(train):
    with pytest.raises(RuntimeError, match=f"{REFUSED[train]} goes on from shard to shard"):
        train()


def plain():
    """Keeps much, but computes no loss from it."""
    (model, run), total, seen, weights, mean = made(), 0.0, [], None, made()[0].mean
    mean = model.mean
    for step in steps(run):
        number = step.number
        with step:
            for x, y in step.shards:
                if weights is None:
                    weights = torch.ones(4)
                loss = cross_entropy(model(x), y, weight=weights) / (1 + number)
                total += loss.item()
                seen.append(total)
                step.backward(loss + 0 * mean.sum())
    return run.digest()


def without_source():
    names = {"made": made, "steps": steps, "cross_entropy": cross_entropy}
    exec(
        "model, run = made()\nfor step in steps(run):\n  with step:\n    for x, y in step.shards:\n"
        "      step.backward(cross_entropy(model(x), y))",
        names,
    )
    return names["run"].digest()


@pytest.mark.parametrize("train", [plain, without_source])
def test_what_a_loss_is_not_computed_from_is_left_alone(train):
    assert train() == train()

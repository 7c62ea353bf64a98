"""Between steps every worker sees the state of an optimizer that Unisono does not know."""

import functools

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from tests.everywhere import Waits, one_result
from torch import nn

import unisono
from unisono.callbacks import Callback


class ScheduleFree(torch.optim.SGD):
    """Keeps an average of the weights in its state, and a count of its own."""

    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            slow = state.setdefault("slow", parameter.clone())
            state["slow"] = slow.lerp(parameter, 1 / self.count)


def hooked(parameters, lr):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def kept_by(optimizer, model):
    """Give something of its state; a program would validate with it, say."""
    names = ("slow", "exp_avg")
    state = [optimizer.state[parameter] for parameter in model.parameters()]
    return sum(float(one[name].abs().sum()) for one in state for name in names if name in one)


class Reads(Callback):
    """Pulls the weights towards what the optimizer has kept, if that is far away."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.seen = []

    def on_step_end(self, fit, step):
        self.seen.append(kept_by(self.optimizer, self.model))
        with torch.no_grad():
            self.model.bias.add_(0.001 * self.seen[-1])

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def made(kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, Reads(model, optimizer)


def train(kind, shards, steps, directory=None):
    model, optimizer, reads = made(kind)
    options = {"directory": directory, "callbacks": [reads, Waits()]}
    trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=shards, **options)
    trainer.fit(by_sign(36), batch_size=12, steps=steps, shuffle=False)
    return reads.seen, trainer.digest()


def by_a_plain_loop(kind, steps):
    model, optimizer, reads = made(kind)
    for step in range(steps):
        start = step * 12 % 36
        optimizer.zero_grad()
        cross_entropy(model, by_sign(36)[start : start + 12]).backward()
        optimizer.step()
        reads.on_step_end(None, None)
    return reads.seen


KINDS = pytest.mark.parametrize("kind", [ScheduleFree, hooked], ids=["unknown", "hooked"])


@KINDS
def test_the_state_is_that_of_a_plain_loop(kind):
    assert train(kind, 1, 6)[0] == by_a_plain_loop(kind, 6)
    assert train(kind, 6, 6)[0] == pytest.approx(by_a_plain_loop(kind, 6), rel=1e-4)


@pytest.mark.slow
@KINDS
def test_every_worker_sees_it_in_every_way(kind, monkeypatch, tmp_path):
    one_result(functools.partial(train, kind, 6), monkeypatch, tmp_path)

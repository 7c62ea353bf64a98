"""Programs that change parameters or optimizer state themselves: changed once, on any number."""

import copy

import numpy as np
import pytest
import torch
from tests.chaos.exchanges import install
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from torch import nn
from torch.optim import SGD, Adam

import unisono
from unisono.callbacks import Callback


def data():
    return at_random(43, 8, 4, seed=3)


def net():
    return nn.Sequential(nn.Linear(8, 150), nn.ReLU(), nn.Linear(150, 4))


class Twins(nn.Module):
    """A net, and a slower one that no optimizer updates."""

    def __init__(self):
        super().__init__()
        self.net, self.target = net(), net()
        self.target.load_state_dict(self.net.state_dict())
        self.target.requires_grad_(False)

    def forward(self, inputs):
        return self.net(inputs) - 0.5 * self.target(inputs)

    def pairs(self):
        return zip(self.target.parameters(), self.net.parameters(), strict=True)


def make(model=net, optimizer=Adam, device="cpu", **options):
    torch.manual_seed(0)
    model = model()
    made = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return unisono.Trainer(model, made, loss_of, shards=4, device=device, **options)


class Between(Callback):
    """Does something after each step."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, fit, step):
        self.change(fit.model, fit.optimizer)


def by_callback(change, device, **options):
    trainer = make(device=device, callbacks=[Between(change)], **options)
    trainer.fit(data(), batch_size=10, steps=6)
    return trainer.digest()


def by_loop(change, device, **options):
    trainer = make(device=device, **options)
    run = trainer.run
    for _ in taken(run, loss_of, data(), batch_size=10, steps=6):
        change(run.model, run.optimizer)
    return trainer.digest()


def averaged_without_gradients(model, _):
    with torch.no_grad():
        for target, online in model.pairs():
            target.lerp_(online, 0.2)


def averaged_in_data(model, _):
    for target, online in model.pairs():
        target.data = target.data * 0.8 + online.data * 0.2


def averaged_by_numpy(model, _):
    for target, online in model.pairs():
        values = target.detach().cpu().numpy()
        values[...] = 0.8 * values + 0.2 * online.detach().cpu().numpy()
        target.data.copy_(torch.from_numpy(values))


def clipped(model, _):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def clipped_anew(model, _):
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def decayed(model, _):
    with torch.no_grad():
        model[0].weight.mul_(0.99)


def noisy(model, _):
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape).to(parameter.device), alpha=0.01)


def simplex_by_numpy(model, _):
    weight = model[2].weight
    rows = np.abs(weight.detach().cpu().numpy())
    weight.data.copy_(torch.from_numpy(rows / rows.sum(1, keepdims=True)))


def momentum_halved(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["step"].mul_(0.5)


def momentum_replaced(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def state_forgotten(_, optimizer):
    if len(optimizer.state) and int(next(iter(optimizer.state.values()))["step"]) == 3:
        optimizer.state.clear()


def state_loaded(_, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


class Langevin(SGD):
    """Draws; so every worker that updates makes the whole update."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn(parameter.shape).to(parameter.device), alpha=0.01)


TRAINED = [clipped, clipped_anew, decayed, noisy, simplex_by_numpy]
STATE = [momentum_halved, momentum_replaced, state_forgotten, state_loaded]
TARGETS = [averaged_without_gradients, averaged_in_data, averaged_by_numpy]


def digests(device="cpu"):
    install(device)
    found = {}
    for way in (by_callback, by_loop):
        for change in (*TRAINED, *STATE):
            found[way.__name__, change.__name__] = way(change, device)
        for change in TARGETS:
            found[way.__name__, change.__name__] = way(change, device, model=Twins)
        found[way.__name__, "whole"] = way(clipped_anew, device, optimizer=Langevin)
    return found


@pytest.fixture(scope="module")
def alone():
    return digests()

"""What a program took of a parameter's memory before `fit` stays the parameter's."""

import copy
import functools

import numpy as np
import pytest
import torch
from tests.everywhere import Waits, one_result
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback
from unisono.engine.exchange.references import References
from unisono.runtime.device import notices


def data():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(36, 6, generator=generator)
    return TensorDataset(rows, rows.sum(1, keepdim=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 8), nn.Linear(8, 1)
        self.half = self.fc.weight[:4]

    def forward(self, rows):
        return self.out(torch.tanh(self.fc(rows)))


class Flat(torch.optim.Optimizer):
    """Owns one flat tensor, of which the weights are views."""

    def __init__(self, params, lr):
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.flat = torch.cat([one.detach().flatten() for one in params])
        start = 0
        for one in params:
            one.data = self.flat[start : start + one.numel()].view_as(one)
            start += one.numel()

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        self.flat.sub_(
            torch.cat([one.grad.flatten() for one in group["params"]]), alpha=group["lr"]
        )


class Kind:
    """A program that keeps a reference; `loss` and `between` use it, `optimizer` may own it."""

    optimizer = staticmethod(functools.partial(torch.optim.SGD, lr=0.05))

    def __init__(self, model):
        self.model = model

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def between(self):
        pass


class Regulariser(Kind):
    def __init__(self, model):
        super().__init__(model)
        self.kept = model.fc.weight.data

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.1 * (model.fc.weight * self.kept).sum()


class StateDict(Regulariser):
    def __init__(self, model):
        super().__init__(model)
        self.kept = model.state_dict()["fc.weight"]


class Rows(Kind):
    def loss(self, model, batch):
        return super().loss(model, batch) + 0.1 * model.half.square().sum()


class Clipped(Kind):
    """Clips by numpy, and edits the same parameter by torch in the same place."""

    def __init__(self, model):
        super().__init__(model)
        self.array = model.fc.weight.detach().numpy()

    def between(self):
        np.clip(self.array[:5], -0.2, 0.2, out=self.array[:5])
        with torch.no_grad():
            self.model.fc.weight[6:].mul_(0.9)


class OfOptimizer(Kind):
    optimizer = staticmethod(functools.partial(Flat, lr=0.05))


class Shared(Kind):
    """Reads what another process would."""

    def __init__(self, model):
        super().__init__(model.share_memory())
        self.there = model.fc.weight.untyped_storage()

    def between(self):
        seen = torch.empty(0).set_(self.there)
        assert torch.equal(seen, self.model.fc.weight.detach().flatten())


KINDS = {
    each.__name__: each for each in (Regulariser, StateDict, Rows, Clipped, OfOptimizer, Shared)
}
EACH = pytest.mark.parametrize("name", KINDS)


class Between(Callback):
    def __init__(self, kind):
        self.kind = kind

    def on_step_end(self, fit, step):
        self.kind.between()


def made(name):
    torch.manual_seed(0)
    model = Net()
    kind = KINDS[name](model)
    return model, kind, kind.optimizer(model.parameters())


def by_a_plain_loop(name, steps):
    model, kind, optimizer = made(name)
    for step in range(steps):
        start = step * 12 % 36
        optimizer.zero_grad()
        kind.loss(model, data()[start : start + 12]).backward()
        optimizer.step()
        kind.between()
    return model.state_dict()


def train(name, shards, steps, directory=None):
    model, kind, optimizer = made(name)
    before = model.fc.weight.data_ptr()
    options = {"directory": directory, "callbacks": [Between(kind), Waits()]}
    trainer = unisono.Trainer(model, optimizer, kind.loss, shards=shards, **options)
    for total in (min(5, steps), steps):  # a second call finds the same memory
        trainer.fit(data(), batch_size=12, steps=total, shuffle=False)
        assert model.fc.weight.data_ptr() == before
    return {key: value.tolist() for key, value in model.state_dict().items()}


@EACH
@pytest.mark.parametrize("shards", [1, 6])
def test_the_weights_are_those_of_a_plain_loop(name, shards):
    found = train(name, shards, 8)
    for key, expected in by_a_plain_loop(name, 8).items():
        mine = torch.tensor(found[key])
        assert torch.allclose(mine, expected, atol=1e-6), key
        assert shards > 1 or torch.equal(mine, expected), key


@pytest.mark.slow
@EACH
def test_they_are_the_same_in_every_way(name, monkeypatch, tmp_path):
    one_result(functools.partial(train, name, 6), monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["staged", "zero"])
def test_they_are_the_same_on_replicas(exchange, monkeypatch):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    for name in ("Regulariser", "Clipped"):
        expected = train(name, 6, 6)
        assert unisono.launch(train, name, 6, 6, workers=2) == [expected] * 2


def test_parameters_over_the_memory_of_others_are_refused_before_the_first_step():
    model, flat = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4)), torch.zeros(12)
    model[0].weight = nn.Parameter(flat[:8].view(2, 4))
    model[1].weight = nn.Parameter(flat[4:].view(4, 2))
    with pytest.raises(ValueError, match=r"`0\.weight` and `1\.weight` are two objects over"):
        unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_evaluation_and_a_digest_see_what_was_written_there():
    model, kind, optimizer = made("Clipped")
    trainer = unisono.Trainer(model, optimizer, kind.loss, shards=2)
    seen = []

    class Zeroes(Callback):
        def on_step_end(self, fit, step):
            before = trainer.digest()
            kind.array[:] = 0
            seen.append((before == trainer.digest(), trainer.evaluate(data(), batch_size=36)))
            assert not model.fc.weight.any()

    trainer.callbacks.append(Zeroes())
    trainer.fit(data(), batch_size=12, steps=1)
    assert not seen[0][0]
    with torch.no_grad():
        expected = float(kind.loss(model, data()[:36]))
    assert seen[0][1]["loss"] == pytest.approx(expected)


def test_nothing_is_kept_where_nobody_looks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[1].weight
    run = unisono.Run(model, torch.optim.Adam(model.parameters()), shards=1)
    for _ in range(2):
        steps = run.position.step + 1
        for step in run.steps(TensorDataset(torch.randn(4, 3)), batch_size=4, steps=steps):
            with step:
                for (rows,) in step.shards:
                    step.backward(model[2](model[1](model[0](rows)[0])).square().mean())
            assert run._context.engine.exchange.references.all == []


def test_on_accelerators_what_a_program_took_counts_and_nothing_else(accelerator):
    """torch calls all of their memory shared; who believed that would compare it in each step."""
    model = nn.Linear(3, 3).to("sim")
    assert References(list(model.parameters()), ()).all == []
    taken = model.weight.data
    (found,) = References(list(model.parameters()), ()).all
    assert found.parameter is model.weight
    assert found.there.data_ptr() == taken.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_the_signs_of_zeros_count(dtype):
    def signs(tensor):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return {bool(sign) for sign in torch.signbit(real).flatten()}

    parameter = nn.Parameter(torch.zeros(3, 2, dtype=dtype).t())
    kept = parameter.data
    references = References([parameter], [])
    parameter.data = parameter.data.clone().neg_()
    references.show()
    assert signs(kept) == {True}
    kept.neg_()
    references.take()
    assert signs(parameter.detach()) == {False}


@pytest.mark.parametrize("copies", [False, True])
def test_a_state_that_is_loaded_twice_without_a_copy_is_reported(capfd, copies):
    notices().discard("loaded again")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    run = unisono.Run(model, optimizer, shards=2)
    data, kept = TensorDataset(torch.randn(32, 4)), {}
    for step in run.steps(data, batch_size=8, steps=6):
        with step:
            for (rows,) in step.shards:
                step.backward(model(rows).pow(2).mean())
        if step.number == 1:
            kept = copy.deepcopy(optimizer.state_dict())
        if step.number in (2, 4):
            optimizer.load_state_dict(copy.deepcopy(kept) if copies else kept)
    assert ("is loaded again from tensors" in capfd.readouterr().err) != copies

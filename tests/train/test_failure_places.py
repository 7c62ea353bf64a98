"""An exception in a step says in which pass it was raised, and over which samples."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no way back")


@dataclass(frozen=True)
class FrozenError(Exception):
    """Takes neither notes nor, from contextlib, a traceback."""


class NotelessError(Exception):
    def add_note(self, note):
        raise TypeError("no notes")


class SilentError(ValueError):
    def __str__(self):
        raise AttributeError("no message")


class FailingSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("no update")


def fit(loss, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = optimizer(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, seed=0, **options)
    data = TensorDataset(torch.randn(40, 4), torch.arange(40))
    trainer.fit(data, batch_size=20, epochs=1, sampler=in_order)


def in_order(epoch, seed):
    return range(40)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1] % 2)


def notes_of(act, *args):
    with pytest.raises(Exception) as caught:
        act(*args)
    return getattr(caught.value, "__notes__", [])


def test_the_forward_pass_names_its_samples():
    def loss(model, batch):
        if 23 in batch[1]:
            raise ArithmeticError("bad sample")
        return loss_of(model, batch)

    assert notes_of(fit, loss) == [
        "This was in step 1, in the forward pass of shard 1, over samples 21, 23, 25, 27, 29, 31, "
        "33, 35 and 2 more."
    ]


def test_so_does_the_backward_pass():
    def loss(model, batch):
        return F.cross_entropy(Fails.apply(model(batch[0])), batch[1] % 2)

    assert notes_of(fit, loss) == [
        "This was in step 0, in the backward pass of shard 0, over samples 0, 2, 4, 6, 8, 10, 12, "
        "14 and 2 more."
    ]


def test_an_update_that_fails_is_told_of():
    assert notes_of(fit, loss_of, FailingSGD) == [
        "This was in step 0, in the sum of gradients or the update."
    ]


def test_what_unisono_refuses_says_so_itself():
    assert notes_of(fit, lambda model, batch: "no loss") == []
    (page,) = notes_of(fit, lambda model, batch: loss_of(model, batch) * float("nan"))
    assert page.endswith("`unisono explain NonFiniteLossError`")


def test_between_passes_the_step_is_named():
    run = unisono.Run(
        model := nn.Linear(4, 2), torch.optim.SGD(model.parameters(), lr=0.1), shards=1
    )

    def train():
        for step in run.steps(TensorDataset(torch.ones(4, 4)), batch_size=2, epochs=1):
            with step:
                for batch in step.shards:
                    step.backward(model(batch[0]).sum())
                raise ArithmeticError("between")

    assert notes_of(train) == ["This was in step 0."]


def test_an_end_is_no_failure():
    def loss(model, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(loss)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("kind", [FrozenError, NotelessError, SilentError])
def test_an_exception_that_takes_no_advice_stays_what_it_is(kind, tmp_path):
    def fails(*args):
        raise kind

    with pytest.raises(kind):
        fit(fails, callbacks=[unisono.callbacks.EventLog(tmp_path / "events.jsonl")])
    if kind is FrozenError:  # what follows has blocks of contextlib around it
        return
    model, data = nn.Linear(4, 2), TensorDataset(torch.ones(4, 4), torch.arange(4))
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters()), loss_of, shards=2)
    with pytest.raises(kind):
        trainer.evaluate(data, batch_size=2, metrics={"m": fails})
    model.forward = fails
    with pytest.raises(kind):
        unisono.DataParallel(model, ["cpu", "cpu"])(torch.ones(4, 4))

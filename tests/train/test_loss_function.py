"""What is no function of (model, batch) is refused at once, with what to write instead."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.training.loss_function import check_loss


def loss_of(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


class Objective:
    def __init__(self, weight=1.0):
        self.weight = weight

    def __call__(self, model, batch):
        return loss_of(model, batch)

    def method(self, model, batch, scale=1.0):
        return scale * loss_of(model, batch)


class Module(nn.Module):
    def forward(self, model, batch):
        return loss_of(model, batch)


@pytest.mark.parametrize(
    "loss",
    [
        loss_of,
        lambda m, b: 0,
        lambda *arguments: 0,
        lambda m, b, *, scale=2: 0,
        Objective(),
        Objective().method,
        functools.partial(Objective().method, scale=2.0),
        Module(),
    ],
)
def test_functions_of_model_and_batch_are_taken(loss):
    check_loss(loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, "is of type NoneType"),
        ("mse", "is of type str"),
        (
            nn.CrossEntropyLoss(),
            r"is `nn.CrossEntropyLoss`, .* `lambda model, batch: criterion\(model\(batch\[0\]\)",
        ),
        (F.mse_loss, r"is `F.mse_loss`, .*: F.mse_loss\(model"),
        (F.cross_entropy, "is `F.cross_entropy`"),
        (lambda model, x, y: 0, r"takes \(model, x, y\); a batch comes as one: .*\*batch\)"),
        (lambda model: 0, r"takes \(model\)\.$"),
        (lambda model, batch, *, scale: 0, "takes .model, batch, scale.; a batch comes as one"),
        (Objective, r"takes \(weight\)\.$"),
    ],
)
def test_other_forms_are_refused(loss, words):
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=words):
        unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


def test_a_dict_without_a_loss_is_told_by_its_keys():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    made = unisono.Trainer(model, optimizer, lambda m, batch: {"cost": m(batch).mean()}, shards=1)
    with pytest.raises(TypeError, match=r"but the keys are \['cost'\]"):
        made.fit([torch.ones(1)] * 2, batch_size=2, steps=1)

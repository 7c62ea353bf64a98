"""What is no function of (model, batch) is refused at once, or as a batch does not fit it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

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


@pytest.mark.parametrize(
    "loss",
    [
        loss_of,
        lambda m, b: 0,
        lambda *arguments: 0,
        lambda m, b, *, scale=2: 0,
        Objective(),
        functools.partial(Objective().method, scale=2.0),
    ],
)
def test_functions_of_model_and_batch_are_taken(loss):
    check_loss(loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (F.mse_loss, r"is `F.mse_loss`, .*: F.mse_loss\(model"),
        (F.cross_entropy, "is `F.cross_entropy`"),
        (lambda model, x, y: 0, r"takes \(model, x, y\); a batch is one argument: .*\*batch\)"),
        (lambda model: 0, r"takes \(model\)\.$"),
        (lambda model, batch, *, scale: 0, "takes .model, batch, scale.; a batch is one argument"),
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


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, image, text, mask=None):
        return self.left(image) + self.right(text)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        return self.layer(batch["image"])


ROWS = [torch.randn(10, 4), torch.randn(10, 3), torch.arange(10) % 2]
TUPLES = TensorDataset(*ROWS)
DICTS = [
    {"image": image, "text": text, "label": label} for image, text, label in zip(*ROWS, strict=True)
]
PAIRS = TensorDataset(*ROWS[:2])


def trainer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, lambda model, batch: 0, shards=2)


def metrics(made, dataset, **options):
    measured = {"matches": lambda outputs, labels: (outputs.argmax(1) == labels).sum()}
    found = made.evaluate(dataset, batch_size=4, metrics=measured, **options)
    return found["matches"]


@pytest.mark.parametrize(
    ("model", "dataset", "words"),
    [
        (Two(), TUPLES, r"`forward\(image, text, mask=None\)`.*\(Tensor\) of a tuple of 3.*'text'"),
        (Two(), DICTS, r"a dict of \['image', 'text', 'label'\].* `lambda model, batch: model\("),
        (Two(), ROWS[0], r"called with \(Tensor\) of a Tensor"),
        (nn.Linear(4, 2), DICTS, r"called with \(dict\).*`forward` \(in `fit`: `validate_f"),
    ],
)
def test_a_batch_that_does_not_fit_the_model_is_refused(model, dataset, words):
    with pytest.raises(TypeError, match=words):
        trainer(model).predict(dataset, batch_size=4)


def test_what_is_no_function_of_model_and_batch_is_refused_at_once():
    made = trainer(nn.Linear(4, 2))
    with pytest.raises(TypeError, match=r"`forward` must be .*\(model, batch\), but takes \(m\)"):
        made.predict(PAIRS, batch_size=4, forward=lambda m: m)
    with pytest.raises(TypeError, match=r"`forward` must be .* is of type str: pass"):
        metrics(made, PAIRS, forward="logits")


def test_a_model_that_takes_a_dict_is_given_it():
    model = Whole()
    rows = trainer(model).predict(DICTS, batch_size=4)
    torch.testing.assert_close(rows, model({"image": ROWS[0]}).detach())  # of other batch sizes


def test_an_error_within_a_model_is_its_own():
    class Broken(nn.Linear):
        def forward(self, inputs):
            raise TypeError("my own")

    with pytest.raises(TypeError, match=r"^my own"):
        trainer(Broken(4, 2)).predict(PAIRS, batch_size=4)

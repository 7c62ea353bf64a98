"""How models of several inputs are called, and what is said where a batch does not fit them."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


class Two(nn.Module):
    """Of two inputs, one of which may be left out."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, image, text, mask=None):
        return self.left(image) + self.right(text)


class Whole(nn.Module):
    """Of a batch as it is."""

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


def test_what_is_suggested_for_several_inputs_works():
    model = Two()
    made = trainer(model)
    made._passes.loss = lambda model, batch: torch.zeros(())
    outputs = model(*ROWS[:2]).detach()
    expected = (outputs.argmax(1) == ROWS[2]).sum()
    for dataset in (TUPLES, DICTS):
        suggested = {}
        for name, ask in (("predict", made.predict), ("evaluate", None)):
            with pytest.raises(TypeError) as caught:
                ask(dataset, batch_size=4) if ask else metrics(made, dataset)
            said = str(caught.value)
            assert "`forward` (in `fit`: `validate_forward`)" in said
            suggested[name] = eval(said.rpartition("such as `")[2].removesuffix("`."))
        rows = made.predict(dataset, batch_size=4, forward=suggested["predict"])
        torch.testing.assert_close(rows, outputs)  # of other batch sizes
        assert metrics(made, dataset, forward=suggested["evaluate"]) == expected


@pytest.mark.parametrize(
    ("model", "dataset", "words"),
    [
        (Two(), TUPLES, r"`forward\(image, text, mask\)`.* \(Tensor\) of a tuple of 3.*'text'"),
        (Two(), DICTS, r"a dict of \['image', 'text', 'label'\].* `lambda model, batch: model\("),
        (Two(), ROWS[0], r"called with \(Tensor\) of a Tensor"),
        (nn.Linear(4, 2), DICTS, r"called with \(dict\).*: model\(batch\[\"image\"\]\)`"),
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

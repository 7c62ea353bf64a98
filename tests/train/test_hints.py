"""A hint is given only if what failed is the call that the hint is about."""

import pytest
import torch
import torch.nn.functional as F
from tests.classified import by_sign
from torch import nn
from torch.utils.data import TensorDataset

import unisono

X, Y = by_sign(32).tensors


class Two(nn.Module):
    """Calls another module in a way that this does not know."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, rows):
        return self.inner(rows, mask=None)


class Squared(nn.Module):
    """Its own mistake looks like one of the samples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, rows):
        return rows @ self.weight


def note(loss, data=None, model=None):
    torch.manual_seed(0)
    model = model or nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2)
    with pytest.raises((TypeError, RuntimeError, AttributeError, IndexError, ValueError)) as caught:
        trainer.fit(data or by_sign(32), batch_size=32, steps=1)
    (said,) = caught.value.__notes__
    place, more, hint = said.partition(" more.")
    assert more, place
    return hint.strip()


def entropy(model, batch, **options):
    return F.cross_entropy(model(batch[0]), batch[1], **options)


def mistyped(model, batch):
    return entropy(model, batch, label_smooth=0.1)


def criterion(model, batch):
    return nn.CrossEntropyLoss()(model(batch[0]), batch[1], smooth=0.1)


def own_list(model, batch):
    names = ["a", "b"]
    return entropy(model, batch) * names.size


def own_lookup(model, batch):
    return entropy(model, batch) + torch.ones(3).index_select(0, torch.tensor([7])).sum()


def own_sum(model, batch):
    return entropy(model, batch) + (torch.ones(2, dtype=torch.double) @ torch.ones(2)).float()


@pytest.mark.parametrize(
    ("loss", "data", "model"),
    [
        (mistyped, None, None),
        (criterion, None, None),
        (entropy, None, Two()),
        (entropy, None, Squared()),
        (own_list, None, None),
        (own_lookup, None, None),
        (own_sum, None, None),
        (entropy, None, nn.Linear(5, 2)),
    ],
)
def test_a_mistake_of_the_programs_own_gets_no_hint(loss, data, model):
    assert note(loss, data, model) == ""


ONE_HOT = TensorDataset(X, F.one_hot(Y))


def by_name(model, batch):
    return model(**batch)["loss"]


NAMED = [{"input": row, "label": label} for row, label in by_sign(32)]
LISTS = [(row, ["a", "b"]) for row, _ in by_sign(32)]


@pytest.mark.parametrize(
    ("loss", "data", "words"),
    [
        (entropy, ONE_HOT, "call `.to(outputs.dtype)` on them, or `.argmax(1)`"),
        (by_name, NAMED, "`remove_columns` of a `datasets.Dataset`"),
        (lambda model, batch: batch[1].shape, LISTS, "Let a `collate_fn` make tensors"),
    ],
)
def test_a_mistake_in_what_is_given_gets_its_hint(loss, data, words):
    assert words in note(loss, data)


def test_the_remedies_for_labels_train():
    for change in (lambda rows: rows.float(), lambda rows: rows.argmax(1)):
        model = nn.Linear(4, 2)

        def loss(model, batch, change=change):
            return F.cross_entropy(model(batch[0]), change(batch[1]))

        trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, shards=2)
        trainer.fit(ONE_HOT, batch_size=16, steps=1)


class Silent(nn.Linear):
    """A layer that computes, and returns nothing."""

    def forward(self, x):
        super().forward(x)


class Abstract(nn.Module):
    def forward(self, x):
        raise NotImplementedError


class Around(nn.Module):
    def __init__(self, inner, *, uses_it):
        super().__init__()
        self.layer, self.inner, self.uses_it = nn.Linear(4, 2), inner, uses_it

    def forward(self, x):
        found = self.inner(x) if self.uses_it else self.layer(x)
        return found + 1


@pytest.mark.parametrize(
    ("model", "fails_in_loss", "is_hinted"),
    [
        (Around(Silent(4, 2), uses_it=True), False, True),
        (Around(Silent(4, 2), uses_it=False), True, False),  # which is not what failed
        (Around(Abstract(), uses_it=False), True, False),
    ],
)
def test_a_forward_that_returns_nothing_is_hinted_at_where_it_is_called(
    model, fails_in_loss, is_hinted
):
    def loss(model, batch):
        outputs = model(batch[0])
        return None + outputs if fails_in_loss else outputs.mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=1)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    with pytest.raises((TypeError, AttributeError), match="NoneType") as caught:
        trainer.fit(data, batch_size=4, steps=1)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert ("The model returns None" in notes) == is_hinted, notes

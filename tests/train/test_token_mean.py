"""The loss of a language model is the mean over all tokens that count, however these lie."""

import functools
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono

LENGTHS = [9, 2, 5, 9, 1, 7, 3, 8, 4, 2, 6, 9]


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Causal(nn.Module):
    """Called as models of transformers are; its own loss is a mean over its batch."""

    def __init__(self, shape=Output):
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.shape = shape

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embed(input_ids)
        logits = self.head(hidden + hidden.cumsum(1) * 0.1)
        loss = None
        if labels is not None and labels.shape == input_ids.shape:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return self.shape(loss=loss, logits=logits)


def data(lengths=LENGTHS):
    rows = []
    for number, length in enumerate(lengths):
        ids = (torch.arange(9) * (number + 3)) % 13
        counts = torch.arange(9) < length
        labels = torch.where(counts, ids, -100)
        rows.append({"input_ids": ids, "attention_mask": counts.long(), "labels": labels})
    return rows


def made(shards, loss=unisono.token_mean, shape=Output, **options):
    torch.manual_seed(0)
    model = Causal(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return unisono.Trainer(model, optimizer, loss, shards=shards, **options)


def whole_batch(model, rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return model(**batch).loss


@pytest.mark.parametrize("shards", [1, 2, 4, 6])
def test_the_mean_is_that_of_all_tokens_of_the_global_batch(shards):
    trainer = made(shards)
    model = made(1).run.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for at in (0, 6):
        loss = whole_batch(model, data()[at : at + 6])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    summary = trainer.fit(data(), batch_size=6, epochs=1, shuffle=False)
    assert summary.means["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for mine, theirs in zip(trainer.run.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    found = trainer.evaluate(data(), batch_size=6)
    assert found["loss"] == pytest.approx(whole_batch(model, data()).item(), rel=1e-6)


def test_a_shard_without_a_token_that_counts_adds_nothing():
    rows = data([9, 1, 9, 1])  # the only label of a sample of one token has no token before it
    assert made(4).evaluate(rows, batch_size=4) == pytest.approx(
        {"loss": whole_batch(made(1).run.model, rows).item()}
    )
    summary = made(4).fit(rows, batch_size=4, epochs=1, shuffle=False)
    assert summary.means["loss"] > 0


@pytest.mark.parametrize("shape", [SimpleNamespace, dict, namedtuple("Named", "loss logits")])
def test_outputs_of_other_kinds_have_logits_too(shape):
    digests = []
    for kind in (Output, shape):
        trainer = made(2, shape=kind)
        trainer.fit(data(), batch_size=6, epochs=1)
        digests.append(trainer.digest())
    assert digests[0] == digests[1]


def test_labels_of_the_tokens_themselves_are_not_shifted():
    loss = functools.partial(unisono.token_mean, shift=False, ignore_index=0)
    model, rows = made(1).run.model, data([9] * 4)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    total, count = loss(model, batch)
    logits = model(**batch).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=0)
    assert (total / count).item() == pytest.approx(expected.item())
    assert made(2, loss=loss).evaluate(rows, batch_size=4)["loss"] == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("change", "shape", "kind", "words"),
    [
        (lambda row: tuple(row.values()), Output, TypeError, 'dicts with "labels", but .* a list'),
        (
            lambda row: {"input_ids": row["input_ids"]},
            Output,
            TypeError,
            r"has \['input_ids'\]: let the dataset",
        ),
        (lambda row: row, lambda loss, logits: (loss, logits), TypeError, "`logits`.* type tuple"),
        (
            lambda row: {"input_ids": row["input_ids"], "labels": row["labels"][:5]},
            Output,
            ValueError,
            r"must have the shape .*\(4, 9\), but have \(4, 5\)",
        ),
    ],
)
def test_what_is_no_language_model_is_refused(change, shape, kind, words):
    rows = [change(row) for row in data([9] * 4)]
    trainer = made(2, shape=shape)
    with pytest.raises(kind, match=words):
        trainer.evaluate(rows, batch_size=4)


def train(steps=4, **options):
    trainer = made(4, precision="bf16", **options)
    trainer.fit(data(), batch_size=6, steps=steps)
    return trainer.digest()


def own_loss(model, batch):
    return model(**batch).loss


def in_a_dict(model, batch):
    return {"loss": own_loss(model, batch), "two": torch.tensor(2.0)}


def of_pairs(model, batch):
    logits = model(batch[0]).logits.flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten())


def summed(model, batch):
    logits, labels = model(batch[0]).logits.flatten(0, 1), batch[1].flatten()
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


def pairs(lengths=LENGTHS):
    return [(row["input_ids"], row["labels"]) for row in data(lengths)]


@pytest.mark.parametrize(
    ("loss", "rows", "is_told"),
    [
        (own_loss, data(), True),
        (in_a_dict, data(), True),
        (of_pairs, pairs(), True),
        (own_loss, data([9] * 12), False),  # all count
        (own_loss, data([5] * 12), False),  # equally many in each
        (of_pairs, pairs([5] * 12), False),
        (unisono.token_mean, data(), False),
        (summed, pairs(), False),
    ],
)
@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_a_mean_over_labels_of_which_some_do_not_count_gets_one_line(
    loss, rows, is_told, use, capsys
):
    trainer = made(2, loss)
    for more in (1, 2):
        how = {"steps": 2 * more} if use == "fit" else {}
        getattr(trainer, use)(rows, batch_size=4, **how)
    said = capsys.readouterr()
    assert (said.out + said.err).count("pass `unisono.token_mean` as the loss") == is_told

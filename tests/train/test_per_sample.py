"""What a loss says of each sample comes back whole, in the order of the batch, on every worker."""

import functools
import hashlib

import pytest
import torch
import torch.nn.functional as F
from tests.classified import by_sign
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback

NUM_SAMPLES = 44


class Priorities(Callback):
    """Weighs samples by their last loss, as prioritised replay does."""

    def __init__(self):
        self.forget()

    def forget(self):
        self.of_sample = torch.ones(NUM_SAMPLES)
        self.pseudo_label = torch.zeros(NUM_SAMPLES, dtype=torch.int64)

    def state_dict(self):
        return {"of_sample": self.of_sample, "pseudo_label": self.pseudo_label}

    def load_state_dict(self, state):
        self.of_sample = state["of_sample"].clone()
        self.pseudo_label = state["pseudo_label"].clone()

    def on_step_end(self, fit, step):
        self.of_sample[step.indices] = 0.5 + step.per_sample["loss"]
        self.pseudo_label[step.indices] = step.per_sample["label"]


def loss_of(priorities, model, batch):
    inputs, labels, numbers = batch
    outputs = model(inputs)
    each = F.cross_entropy(outputs, labels, reduction="none")
    weighted = (each * priorities.of_sample[numbers]).mean()
    rows = {"loss": each, "label": outputs.argmax(1), "number": numbers}
    return {"loss": weighted, "plain": each.mean(), "per_sample": rows}


def train(steps=9, directory=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    priorities = Priorities()
    trainer = unisono.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        functools.partial(loss_of, priorities),
        shards=5,
        seed=3,
        directory=directory,
        callbacks=[priorities],
        **options,
    )
    rows = TensorDataset(*by_sign(NUM_SAMPLES).tensors, torch.arange(NUM_SAMPLES))
    trainer.fit(rows, batch_size=16, steps=steps)  # a last batch of 12 samples
    kept = priorities.of_sample.numpy().tobytes() + priorities.pseudo_label.numpy().tobytes()
    return trainer.digest(), hashlib.blake2b(kept).hexdigest()


def test_rows_are_in_the_order_of_the_batch_and_indices_name_them():
    seen = []

    class Look(Callback):
        def on_step_end(self, fit, step):
            seen.append((step.indices, step.per_sample["number"].tolist(), step.num_samples))

    look = Look()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = functools.partial(loss_of, Priorities())
    trainer = unisono.Trainer(model, optimizer, loss, shards=3, callbacks=[look])
    rows = TensorDataset(*by_sign(NUM_SAMPLES).tensors, torch.arange(NUM_SAMPLES))
    trainer.fit(rows, batch_size=16, epochs=1)
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    assert seen == [(some, some, len(some)) for some in (order[:16], order[16:32], order[32:])]


def test_a_loop_and_a_loss_of_features_have_them_too():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=3)

    def loss(outputs):
        return {"loss": outputs.mean(), "per_sample": {"mean": outputs.mean(1)}}

    data, found = by_sign(NUM_SAMPLES), []
    for step in run.steps(data, batch_size=16, steps=2):
        with torch.no_grad():
            expected = model(data.tensors[0]).mean(1)
        with step:
            if step.number:
                step.gather(lambda batch: model(batch[0]), loss)
            else:
                for batch in step.shards:
                    step.backward(loss(model(batch[0])))
        assert torch.allclose(step.per_sample["mean"], expected[step.indices])
        found.append(step.means.keys())
    assert found == [{"loss"}, {"loss"}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3), "must be a dict of tensors"),
        ({"a": torch.zeros(3)}, r"each of the \d+ samples, but 'a' is \(3,\)"),
        ({"a": 1.0}, r"each of the \d+ samples, but 'a' is float"),
    ],
)
def test_what_is_no_row_per_sample_is_refused(value, words):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        return {"loss": model(batch[0]).mean(), "per_sample": value}

    with pytest.raises(TypeError, match=words):
        unisono.Trainer(model, optimizer, loss, shards=2).fit(by_sign(20), batch_size=10, steps=1)


class Remembering(nn.Module):
    """Returns rows in memory that its next pass writes to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(4, 1))

    def forward(self, inputs):
        self.seen.copy_(inputs)
        return self.layer(inputs)


def test_rows_are_those_of_their_pass():
    rows = TensorDataset(torch.arange(8.0).reshape(8, 1))
    model = Remembering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=2, buffers={"seen": "first"})
    for step in run.steps(rows, batch_size=8, steps=1, shuffle=False):
        with step:
            for batch in step.shards:
                loss = model(batch[0]).mean()
                step.backward({"loss": loss, "per_sample": {"a": model.seen, "b": model.seen}})
        for name in ("a", "b"):
            assert step.per_sample[name].flatten().tolist() == [*range(8)]
    trainer = unisono.Trainer(model, optimizer, lambda model, batch: model(batch[0]).mean())
    found = trainer.evaluate(
        rows,
        batch_size=4,
        metrics={"rows": lambda rows: rows.flatten().tolist()},
        forward=lambda model, batch: (model(batch[0]), model.seen)[1:],
    )
    assert found["rows"] == [*range(8)]


def test_rows_of_conjugates_are_conjugate():
    model = nn.Linear(1, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    rows = TensorDataset(torch.complex(torch.ones(8, 1), torch.arange(8.0).reshape(8, 1)))
    for step in run.steps(rows, batch_size=8, steps=1, shuffle=False):
        with step:
            for (batch,) in step.shards:
                loss = model(batch.real).mean()
                step.backward({"loss": loss, "per_sample": {"rows": batch.conj()}})
        assert step.per_sample["rows"].imag.flatten().tolist() == [-row for row in range(8)]


def test_rows_that_cannot_be_sent_are_refused():
    model = nn.Linear(1, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    with pytest.raises(TypeError, match=r"torch.complex128: use `torch\.view_as_real`"):
        for step in run.steps(TensorDataset(torch.ones(8, 1)), batch_size=8, steps=1):
            with step:
                for (batch,) in step.shards:
                    rows = torch.complex(batch.double(), batch.double())
                    step.backward({"loss": model(batch).mean(), "per_sample": {"rows": rows}})


def names_by_shard():
    model = nn.Linear(1, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    for step in run.steps(TensorDataset(torch.ones(8, 1)), batch_size=8, steps=1):
        with step:
            for (batch,) in step.shards:
                name = "odd" if unisono.progress().shard else "even"
                step.backward({"loss": model(batch).mean(), "per_sample": {name: batch}})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_names_that_differ_between_shards_are_refused(workers):
    with pytest.raises(unisono.errors.MismatchError, match="'even', 'odd'"):
        unisono.launch(names_by_shard, workers=workers)
